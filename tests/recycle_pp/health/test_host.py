"""Samples of a host's health, from files of sysfs and the kernel's log."""

import os

import pytest

from recycle_pp.health.host import Host
from recycle_pp.health.ladder import History, judge


@pytest.fixture
def sys(tmp_path):
    """A function that writes files of a fake sysfs, named as in PATHS. `path`: its root."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / PATHS[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    write.path = tmp_path
    return write


CPU = "devices/system/cpu/cpu0"
PATHS = {
    "ue": "devices/system/edac/mc/mc0/ue_count",
    "ce": "devices/system/edac/mc/mc1/ce_count",
    "hot": f"{CPU}/thermal_throttle/core_throttle_count",
    "clock": f"{CPU}/cpufreq/scaling_cur_freq",
    "most": f"{CPU}/cpufreq/cpuinfo_max_freq",
    "ib": "class/infiniband/mlx5_0/ports/1/state",
    "downs": "class/infiniband/mlx5_0/ports/1/counters/link_downed",
    "symbols": "class/infiniband/mlx5_0/ports/1/counters/symbol_error",
    "crc": "class/net/eth0/statistics/rx_crc_errors",
    "card": "class/net/eth0/device",
    "eth": "class/net/eth0/operstate",
    "bridge": "class/net/docker0/operstate",
}


def test_the_sample_is_empty_in_a_container_without_these_files(tmp_path):
    sample = Host(tmp_path, tmp_path / "no log").sample()
    assert sample.uncorrected is sample.clock is sample.link_downs is None
    assert not (sample.throttle or sample.ports or sample.disk)


def test_memory_errors_and_ports_are_read(sys, tmp_path):
    sys(ue=2, ce=40, ib="4: ACTIVE", downs=3, symbols=5, crc=6, card="", eth="up", bridge="up")
    sample = Host(sys.path, tmp_path / "no log").sample()
    assert (sample.uncorrected, sample.corrected, sample.port_errors) == (2, 40, 11)
    assert (sample.ports, sample.link_downs) == ({"mlx5_0", "eth0"}, 3)
    sys(ib="1: DOWN", downs=4)
    sample = Host(sys.path, tmp_path / "no log").sample()
    assert (sample.ports, sample.link_downs) == ({"eth0"}, 4)


def test_the_clocks_of_a_few_cores_are_read_on_a_large_machine(tmp_path):
    for number, core in enumerate(sorted(f"cpu{core}" for core in range(64))):
        path = tmp_path / f"devices/system/cpu/{core}/cpufreq/scaling_cur_freq"
        path.parent.mkdir(parents=True)
        path.write_text("1000000" if number % 8 else "2600000")
    assert Host(tmp_path, tmp_path / "no log").sample().clock == 2600


def test_a_processor_is_hot_while_its_throttle_count_rises(sys, tmp_path):
    sys(hot=5, clock=3_000_000)
    host = Host(sys.path, tmp_path / "no log")
    sample = host.sample()
    assert not sample.throttle and sample.clock == 3000
    sys(hot=9, clock=1_500_000)
    sample = host.sample()
    assert (sample.throttle, sample.clock) == ({"heat"}, 1500)
    assert not host.sample().throttle


@pytest.mark.parametrize(("hot_clock", "action"), [(2_600_000, "note"), (1_300_000, "slow")])
def test_a_hot_processor_is_slow_only_if_its_clock_is_below_its_usual_one(sys, tmp_path, hot_clock, action):
    """With all cores busy, the usual clock is below the highest one."""
    sys(hot=0, clock=2_600_000, most=3_800_000)
    host = Host(sys.path, tmp_path / "no log")
    history = History.begin(host.sample())
    for count in (1, 2):
        sys(hot=count, clock=hot_clock)
        history = history.add(host.sample())
    (finding,) = judge(history)
    assert (finding.signal, finding.action) == ("throttle", action)


def test_the_kernels_log_shows_disks_and_xids_once(tmp_path):
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    host = Host(tmp_path, log)
    with open(log, "w") as kernel:
        kernel.write("3,801,77,-;I/O error, dev sda, sector 8 op 0x0:(READ)\n SUBSYSTEM=block\n6,802,78,-;eth0 is up\n")
        kernel.write("4,803,79,-;NVRM: Xid (PCI:0000:65:00): 79, pid=1, GPU has fallen off the bus.\n")
        kernel.flush()
        assert host.sample().disk == ("I/O error, dev sda, sector 8 op 0x0:(READ)",)
        assert host.xids == [("0000:65:00", 79)]
        assert host.sample().disk == () and host.xids == []
