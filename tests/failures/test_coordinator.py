"""The coordinator's host dies, and the job continues. The supervisors elect a new leader, and no work is repeated."""

import pytest

from tests.etcd import EtcdServer, needs_etcd

from .harness import Case, SignalAt, explain, fails, rejoins

slow = pytest.mark.slow


def host(event, after=0.0, victim="0.0", nth=1):
    """A signal that kills a worker and its supervisor, as when a node is lost."""
    return SignalAt(event, victim, nth=nth, after=after, supervisor=True)


def case(claim, *signals, shape="2x2", overrides=(), **options):
    nodes = {"2x2": 4, "3x2": 6}[shape]
    return Case(claim, shape, tuple(overrides), signals, nodes=nodes, **{"steps": 12, "bound": 120.0, **options})


SURVIVED = [
    case("the host is killed during a step", host("started", 0.4), steps=24, stagger=True),
]
MORE = [
    case(
        "the host is killed, with sharded state",
        host("started", 0.4),
        overrides=["parallel.sharded=true"],
        steps=24,
    ),
    case("two hosts die in a row", host("started", 0.3), host("coordinator_elected", 0.3, "0.1"), deaths=2, steps=40),
    case(
        "the host dies during the recovery from another death",
        host("death_detected"),
        shape="3x2",
        overrides=fails("3:1.1"),
        deaths=2,
    ),
    case("the host is killed during a step", host("started", 0.4), steps=24),
    case("the host is killed right after the start", host("started")),
    case(
        "the host dies while a checkpoint is being written", host("checkpoint_saved"), overrides=["checkpoint.every=2"]
    ),
    case(
        "the saver of the last checkpoint dies, and then the host",
        host("death_detected"),
        shape="3x2",
        overrides=fails("11:0.1@checkpoint"),
        deaths=2,
    ),
    case(
        "the host dies while a worker process is restarted",
        SignalAt("started", "1.1"),
        host("respawned", 0.2),
        deaths=2,
        steps=40,
    ),
    case(
        "the host dies while a worker receives the state",
        host("joining"),
        shape="3x2",
        overrides=[*fails("3:2.1"), *rejoins("8:2.1")],
        deaths=2,
        steps=40,
    ),
    case(
        "the second host dies as soon as it is elected",
        host("started", 0.3),
        host("coordinator_elected", victim="0.1"),
        shape="3x2",
        deaths=2,
    ),
    case(
        "three hosts die in a row",
        host("started", 0.2),
        host("coordinator_elected", 0.3, "0.1"),
        host("coordinator_elected", 0.3, "1.0", nth=2),
        shape="3x2",
        deaths=3,
        steps=60,
    ),
]
MORE += [
    case(f"the host is killed {after} ms after the start", host("started", after / 1000), stagger=stagger, steps=40)
    for after in (100, 200, 300, 500, 700)
    for stagger in (False, True)
]


@pytest.mark.parametrize("case", [*SURVIVED, *(pytest.param(c, marks=slow) for c in MORE)], ids=str)
def test_the_job_continues_without_the_host_of_its_coordinator(case, runs):
    outcome = runs.of(case, "the coordinator's host")
    runs.check_exact(outcome)
    assert outcome.all("coordinator_lost") and outcome.all("coordinator_elected"), explain(outcome)


@needs_etcd
def test_an_etcd_can_elect_the_next_coordinator(runs, tmp_path):
    with EtcdServer(tmp_path) as etcd:
        overrides = ["coordinator=etcd", f"control.endpoints=[{etcd.endpoint}]"]
        killed = case("the host is killed, and etcd elects", host("started", 0.4), overrides=overrides, steps=24)
        outcome = runs.of(killed, "the coordinator's host")
    runs.check_exact(outcome)
    assert outcome.all("coordinator_lost") and outcome.all("coordinator_elected"), explain(outcome)


@slow
def test_the_stall_of_a_take_over_is_measured(runs):
    killed = case("the host is killed", host("started", 0.3))
    outcome = runs.of(killed, "the coordinator's host")
    (elected,) = outcome.all("coordinator_elected")
    assert elected["rank"] != 0 and elected["term"] > 0, "a new term with another leader, usually rank 1 in term 1"
    (death,) = outcome.all("death_detected")
    assert (death["worker"], death["cause"]) == ("0.0", "node_loss")
    (resumed,) = outcome.all("resumed")
    assert list(resumed["phases"])[:3] == ["died", "detected", "elected"]
    assert resumed["dead"] == ["0.0"]
    assert "3 of 4 workers" in outcome.output, explain(outcome)


@slow
@pytest.mark.parametrize("dead", [["0.0", "1.0", "1.1"], ["0.0", "0.1", "1.0"]], ids=str)
def test_the_last_survivor_on_a_machine_stops_the_job_and_names_the_lost_stage(dead, runs):
    """The survivor needs no majority, because it can prove the other deaths. But one worker cannot run two stages."""
    # Worker 0.0 dies 0.3 s after the start, when all processes are running.
    signals = [host("started", 0.3 * (victim == "0.0"), victim) for victim in dead]
    stops = case("most supervisors are killed at once", *signals, deaths=None, ends="has no live worker left")
    outcome = runs.of(stops, "the coordinator's host")
    assert "majority" not in outcome.output
    assert outcome.code == 1


@slow
def test_the_job_ends_if_all_workers_are_lost_with_the_coordinator(runs):
    signals = [host("started", 0.5), *(SignalAt("started", victim) for victim in ("0.1", "1.0", "1.1"))]
    stops = case("all workers die with the host", *signals, deaths=None, ends="were lost at once", steps=60)
    outcome = runs.of(stops, "the coordinator's host")
    assert outcome.code == 1 and "there is no checkpoint to continue from" in outcome.output
    assert len(outcome.all("started")) == 1, explain(outcome)


@slow
@pytest.mark.parametrize("after", [0.0, 0.4])
def test_the_job_restarts_again_if_the_coordinator_is_lost_during_a_restart_of_all_workers(after, runs):
    lost = [SignalAt("started", "0.1", after=0.5), SignalAt("started", "1.1")]
    restarts = case(f"the host dies {after} s into a restart", *lost, host("restored", after), deaths=None, steps=40)
    outcome = runs.of(restarts, "the coordinator's host")
    runs.check_exact(outcome)
    assert outcome.all("coordinator_elected") and outcome.all("restored"), explain(outcome)


@slow  # quick counterpart: the loss of a node that does not host the coordinator in test_nodes.py
def test_the_loss_of_another_supervisor_is_an_ordinary_death(runs):
    killed = case("another supervisor is killed", host("started", 0.3, "1.1"))
    outcome = runs.of(killed, "the coordinator's host")
    runs.check_exact(outcome)
    assert not outcome.all("coordinator_lost")
