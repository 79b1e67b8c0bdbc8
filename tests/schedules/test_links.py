"""Links: which link connects two hosts, and one clear sentence for every mistake."""

import json

import pytest
from hypothesis import given, settings
from random_problems import linked
from recycle_schedules import Problem
from recycle_schedules.links import Link, Links

TWO_HOSTS = {"hosts": [["a", "a"], ["b", "b"]], "within_host": {"latency": 1}, "between_hosts": {"latency": 2}}


def links(**keys):
    return Links.of(TWO_HOSTS | keys, pipelines=2, stages=2)


def test_a_message_takes_latency_plus_bytes_over_bandwidth():
    assert Link(latency=0.5, bandwidth=10).time(20) == 2.5
    assert Link(latency=0.5).time(1e12) == 0.5, "the default bandwidth must be infinite"


def test_a_link_is_within_a_host_between_hosts_or_between_zones_unless_it_was_measured():
    far = {"between_zones": {"latency": 3}}
    assert links().between("a", "a").latency == 1
    assert links().between("a", "b").latency == 2
    assert links(**far).between("a", "b").latency == 2, "hosts without a zone must share one"
    assert links(zones={"a": "west"}, **far).between("a", "b").latency == 3
    assert links(zones={"a": "west"}).between("a", "b").latency == 2, "between_zones must default to between_hosts"
    assert links(measured=[["b", "a", {"latency": 9}]]).between("a", "b").latency == 9


MISTAKES = [
    ([], "links: expected an object with the keys hosts, zones"),
    ({"host": 1}, "links: unknown key 'host'"),
    ({}, "links.hosts: expected 2 lists of 2 names"),
    (TWO_HOSTS | {"hosts": [["a", "a"], ["b"]]}, "links.hosts: expected 2 lists of 2 names"),
    (TWO_HOSTS | {"hosts": [["a", "a"], ["b", 1]]}, "links.hosts: 1 is not a name"),
    (TWO_HOSTS | {"zones": {"c": "west"}}, "links.zones: 'c' is not in links.hosts"),
    (TWO_HOSTS | {"zones": ["west"]}, "links.zones: expected an object like"),
    (TWO_HOSTS | {"within_host": 3}, "links.within_host: expected an object with latency and bandwidth, not 3"),
    (
        TWO_HOSTS | {"within_host": {"latency": -1}},
        "links.within_host.latency: -1 is not a finite number",
    ),
    (TWO_HOSTS | {"within_host": {"bandwidth": 0}}, "links.within_host.bandwidth: 0 is not above 0"),
    (TWO_HOSTS | {"measured": [["a", "b"]]}, "links.measured: an entry is"),
    (TWO_HOSTS | {"measured": [["a", "c", {}]]}, "links.measured: 'c' is not in links.hosts"),
    (
        TWO_HOSTS | {"measured": [["a", "b", {}], ["b", "a", {}]]},
        "the link between b and a is given twice",
    ),
    (TWO_HOSTS | {"bytes": [1, 2]}, "links.bytes: expected 1 numbers, one per stage boundary, not 2"),
    (TWO_HOSTS | {"bytes": "many"}, "links.bytes: 'many' is not a finite number"),
]


@pytest.mark.parametrize(("value", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_a_mistake_is_reported_in_one_sentence_that_names_the_key(value, sentence):
    with pytest.raises(ValueError, match=sentence):
        Problem(pipelines=2, stages=2, microbatches=1, links=value)


def test_links_and_send_exclude_each_other():
    with pytest.raises(ValueError, match="links: cannot be combined with send"):
        Problem(pipelines=2, stages=2, microbatches=1, links=TWO_HOSTS, send=1)


@settings(deadline=None)
@given(linked())
def test_problems_with_links_round_trip_through_json(problem):
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@settings(deadline=None)
@given(linked())
def test_a_subset_of_a_problems_pipelines_keeps_its_links(problem):
    kept = list(range(0, problem.pipelines, 2))
    part = Links.of(problem.graph.links.of_pipelines(kept), len(kept), problem.stages)
    for d, row in zip(kept, part.hosts, strict=True):
        assert row == problem.graph.links.hosts[d]
        for a in row:
            for b in row:
                assert part.between(a, b) == problem.graph.links.between(a, b)
