"""Each mutation of `mutations.py` gives a valid program that differs from the original. Probes change no behaviour."""

import ast
import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # as when mutations.py runs as a script

import mutations as tool
from mutants import COMPARISON, STATEMENT, Mutation, of_text

sys.path.pop(0)  # else tests/recycle_pp would shadow the product, here and in child processes

SOURCE = '''
LIMIT = max(1, 2) if 1 < 2 else 0

class Counter:
    """Counts ä."""

    def add(self, a, b):
        """Docstring."""
        if a < b or "ü" in f"{a == b}":
            self.total += min(a, b)
            self.put(a, b, key=a)
        elif a is None:
            raise ValueError(a, b)
        return pow(a, b)
'''


def test_every_kind_of_mutation_is_found_only_inside_functions():
    found = {(m.function, m.kind, m.old): m.new for m in of_text(SOURCE, "x.py")}
    assert found == {
        ("Counter.add", "comparison negated", "a < b"): "(a) >= (b)",
        ("Counter.add", "comparison negated", '"ü" in f"{a == b}"'): '("ü") not in (f"{a == b}")',
        ("Counter.add", "comparison negated", "a is None"): "(a) is not (None)",
        ("Counter.add", "statement dropped", "self.total += min(a, b)"): "pass",
        ("Counter.add", "statement dropped", "self.put(a, b, key=a)"): "pass",
        ("Counter.add", "statement dropped", "raise ValueError(a, b)"): "pass",
        ("Counter.add", "arguments swapped", "self.put(a, b, key=a)"): "self.put(b, a, key=a)",
        ("Counter.add", "arguments swapped", "ValueError(a, b)"): "ValueError(b, a)",
        ("Counter.add", "arguments swapped", "pow(a, b)"): "pow(b, a)",
    }


def test_each_mutation_and_each_probe_of_the_product_compiles():
    places = tool.mutations(tool.ROOT, "recycle_pp/protocol")
    assert len(places) > 500
    for mutation in tool.draw([places], seed=1, count=60):
        text, place = (tool.ROOT / mutation.path).read_text(), places[mutation]
        assert text[place.start : place.stop] == mutation.old
        original = ast.dump(ast.parse(text))
        for new in (mutation.new, tool.probe(mutation, 7)):
            assert ast.dump(ast.parse(place.replace(text, new))) != original, mutation


def test_a_draw_depends_only_on_the_seed_and_has_no_overlaps():
    places = tool.mutations(tool.ROOT, "recycle_pp/protocol", "recycle_pp/state")
    drawn = tool.draw([places], seed=3, count=30)
    assert drawn == tool.draw([places], seed=3, count=30) != tool.draw([places], seed=4, count=30)
    assert {m.kind for m in drawn} == set(tool.KINDS)
    ends = sorted((m.path, places[m].start, places[m].stop) for m in drawn)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(ends))


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """`mutation_probe.py`, imported as a probe imports it."""
    monkeypatch.setenv("MUTATIONS", str(tmp_path))
    spec = importlib.util.spec_from_file_location("mutation_probe", Path(__file__).with_name("mutation_probe.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "mutation_probe", module)
    return module


@pytest.mark.parametrize(
    ("old", "kind"), [("a < b", COMPARISON), ("seen.append(a)", STATEMENT), ("pow(a, b)", "arguments swapped")]
)
def test_a_probe_records_the_test_and_changes_no_result(old, kind, plugin, tmp_path):
    source = "def add(a, b):\n    seen = []\n    if a < b: seen.append(a)\n    return seen, pow(a, b)\n"
    mutation = Mutation("x.py", "add", kind, old, "", 0)
    place = next(place for m, place in of_text(source, "x.py").items() if (m.old, m.kind) == (old, kind))
    names: dict = {}
    exec(place.replace(source, tool.probe(mutation, 5)), names)
    plugin._runs("call", "tests/test_x.py::test_y[ä]")
    assert [names["add"](2, 3), names["add"](2, 3)] == [([2], 8)] * 2
    assert (tmp_path / "reached").read_text() == "5\tcall\ttests/test_x.py::test_y[ä]\n"
