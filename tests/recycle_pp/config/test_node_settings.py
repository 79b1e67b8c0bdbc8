"""The settings that all nodes of a job must share, and the first difference between two nodes."""

from recycle_pp.config.compose import compose
from recycle_pp.config.node_settings import NodeSettings, first_difference


def node(*arguments):
    return NodeSettings.of(compose(list(arguments)), arguments)


def test_the_first_key_that_differs_is_named_with_both_values():
    assert first_difference(node("run.steps=60").shared, node("run.steps=100").shared) == ("run.steps", "60", "100")
    assert first_difference(node().shared, node("parallel.sharded=true").shared) == (
        "parallel.sharded",
        "false",
        "true",
    )
    assert first_difference(node().shared, node("model=tiny").shared)[0].startswith("model.")


def test_faults_are_settings_of_the_whole_job():
    assert first_difference(node().shared, node("+fail_at=3:0.1").shared) == ("fail_at", "[]", "['3:0.1']")


def test_address_and_interface_may_differ_between_nodes():
    here = node("control.address=10.0.0.1:29501", "control.interface=eth0")
    there = node("control.address=host0:29501", "control.interface=ens5")
    assert first_difference(here.shared, there.shared) is None
    assert (here.interface, there.interface) == ("eth0", "ens5")


def test_a_run_folder_named_after_the_time_may_differ_and_a_given_one_may_not(monkeypatch):
    assert first_difference(node().shared, node().shared | {"run.dir": node().shared["run.dir"]}) is None
    key, here, there = first_difference(node().shared, node("run.dir=/shared/mine").shared)
    assert (key, there) == ("run.dir", "/shared/mine")
    assert "named after the time" in here
    dated = node("run.dir=runs/${now:%H-%M-%S-%f}").shared
    assert first_difference(dated, node("run.dir=runs/${now:%H-%M-%S-%f}").shared) is None


def test_a_key_that_one_node_does_not_know_is_a_difference():
    later = dict(node().shared) | {"run.brand_new": "1"}
    assert first_difference(node().shared, later) == (
        "run.brand_new",
        "no such key (a different version of recycle_pp)",
        "1",
    )
