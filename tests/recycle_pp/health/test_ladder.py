"""A series of samples leads to an action, from a note to the quarantine of a GPU."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.health import xids
from recycle_pp.health.ladder import LOOKS, History, judge
from recycle_pp.health.sample import Sample

WELL = Sample(
    "GPU-1", uncorrected=0, corrected=0, temperature=60, power=500, clock=1900, top_clock=1980, busy=90, links=18,
    link_errors=0, ports=frozenset(["eth0"]), link_downs=0,
)  # fmt: skip


def well(**changes):
    return Sample(**{f.name: getattr(WELL, f.name) for f in fields(Sample)} | changes)


def seen(*samples):
    """The findings after these samples: signal -> action."""
    history = History.begin(samples[0])
    for sample in samples[1:]:
        history = history.add(sample)
    return {finding.signal: finding.action for finding in judge(history)}


def test_a_healthy_device_has_no_findings():
    assert seen(*[WELL] * 20) == {}


anything = st.builds(
    Sample,
    device=st.just("GPU-1"),
    xids=st.lists(st.sampled_from([x for x in range(200) if x != xids.OFF_THE_BUS]), max_size=3).map(tuple),
    uncorrected=st.none() | st.integers(0, 5),
    corrected=st.none() | st.integers(0, 5),
    remap_pending=st.booleans(),
    remap_failed=st.booleans(),
    throttle=st.frozensets(st.sampled_from(["heat", "power"])),
    temperature=st.none() | st.floats(0, 120),
    clock=st.none() | st.floats(100, 2000),
    top_clock=st.just(1980.0),
    links=st.none() | st.integers(0, 18),
    disk=st.just(("I/O error, dev sda",)) | st.just(()),
)


@given(anything)
def test_a_single_sample_is_at_most_noted(sample):
    assert set(seen(sample).values()) <= {"note"}
    assert set(seen(*[WELL] * 9, sample).values()) <= {"note"}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"lost": True}, {"lost": "kill"}),
        ({"xids": (79,)}, {"xid": "kill"}),
        ({"recovery": "GPU_RESET"}, {"recovery": "drain"}),
    ],
)
def test_three_signals_need_no_second_sample(change, found):
    assert seen(well(**change)) == seen(WELL, well(**change)) == found


@pytest.mark.parametrize(
    ("change", "signal", "action"),
    [
        ({"uncorrected": 2}, "ecc", "drain"),
        ({"remap_failed": True}, "remap", "kill"),
        ({"links": 17}, "nvlink", "drain"),
        ({"xids": (119,)}, "xid", "drain"),
        ({"xids": (13,)}, "xid", "note"),
        ({"throttle": frozenset(["heat"]), "clock": 1000}, "throttle", "slow"),
        ({"throttle": frozenset(["power"]), "clock": 1850}, "throttle", "note"),
        ({"temperature": 93}, "temperature", "note"),
        ({"ports": frozenset()}, "nic", "note"),
        ({"remap_pending": True}, "remap", "note"),
    ],
)
def test_a_second_sample_confirms_the_first(change, signal, action):
    assert seen(WELL, well(**change), well(**change)) == {signal: action}


def test_errors_from_before_the_job_do_not_drain_it():
    assert seen(*[well(uncorrected=7)] * 5) == {"ecc": "note"}
    assert seen(well(uncorrected=7), *[well(uncorrected=8)] * 2) == {"ecc": "drain"}


def test_a_count_that_was_wrong_in_one_sample_is_forgotten():
    assert seen(WELL, well(uncorrected=9), WELL) == {}


@pytest.mark.parametrize(("count", "signal"), [("port_errors", "nic"), ("corrected", "ecc")])
def test_damaged_packets_and_corrected_errors_are_noted_if_they_keep_coming(count, signal):
    assert seen(*[well(**{count: n}) for n in (0, 1, 1, 1, 1)]) == {}
    assert seen(*[well(**{count: n}) for n in (0, 1, 2, 9)]) == {signal: "note"}


def test_a_hot_gpu_counts_as_slow_until_it_has_been_cool_for_a_minute():
    hot = well(throttle=frozenset(["heat"]), clock=950)
    looks = [WELL, hot, WELL, hot]
    assert seen(*looks) == {"throttle": "slow"}
    assert seen(*looks, *[WELL] * (LOOKS - 1)) == {"throttle": "slow"}
    assert seen(*looks, *[WELL] * LOOKS) == {}
    (finding,) = judge(History.begin(WELL).add(hot).add(hot))
    assert finding.factor == 2.0 and "950 MHz instead of 1900" in finding.detail, "compared with its clock under load"


def test_a_throttled_gpu_is_not_compared_with_its_idle_clock():
    idle, hot = well(busy=0, clock=345), well(throttle=frozenset(["heat"]), clock=990)
    (finding,) = judge(History.begin(idle).add(hot).add(hot))
    assert finding.factor == 2.0


def test_a_host_without_gpus_is_judged_in_the_same_way():
    host = Sample("host", uncorrected=0, clock=3000)
    assert seen(host, *[Sample("host", uncorrected=1)] * 2) == {"ecc": "drain"}
    hot = Sample("host", uncorrected=0, throttle=frozenset(["heat"]), clock=1500)
    assert seen(host, hot, hot) == {"throttle": "slow"}
    assert seen(hot, hot) == {"throttle": "note"}, "its usual clock is unknown"
    assert seen(host, Sample("host", uncorrected=0, disk=("I/O error, dev sda",))) == {"disk": "note"}


def test_the_catalogue_has_nvidias_bucket_of_each_code():
    assert xids.of(79) == (79, "RESTART_BM", "GPU has fallen off the bus")
    drained = {code for code in range(200) if xids.of(code).drains}
    assert {46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140} <= drained
    assert not drained & {13, 31, 43, 45, 63, 92, 94, 154, 199}
    assert xids.of(199).text() == "XID 199, which is not in NVIDIA's catalogue"
