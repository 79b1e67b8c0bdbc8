"""Lines of a replaced coordinator do not count after those of its successor."""

from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.wire.terms import Terms, without_undone

PLACES = st.tuples(st.integers(-1, 3), st.integers(0, 9))  # term, step


def test_a_line_counts_unless_it_follows_a_line_with_a_newer_term():
    terms = Terms()
    assert [terms.counts(term) for term in (-1, -1, 0, -1, 0, 2, 0, 1, 2)] == [
        True, True, True, False, True, True, False, False, True,
    ]  # fmt: skip


def test_a_repeated_step_removes_its_earlier_lines_and_those_of_later_steps():
    assert without_undone([0, 1, 2, 3, 1, 2, 4], step=lambda step: step) == [0, 1, 2, 4]


@given(st.lists(PLACES))
def test_with_lines_of_several_coordinators_each_step_has_one_line_of_the_newest_term(lines):
    terms = Terms()
    kept = without_undone([line for line in lines if terms.counts(line[0])], step=lambda line: line[1])
    steps = [step for _, step in kept]
    assert steps == sorted(set(steps))
    assert [term for term, _ in kept] == sorted(term for term, _ in kept)
    newest = max((term for term, _ in lines), default=None)
    assert {step for term, step in kept if term == newest} <= {step for term, step in lines if term == newest}
    assert not lines or kept[-1] == [line for line in lines if line[0] == newest][-1]
