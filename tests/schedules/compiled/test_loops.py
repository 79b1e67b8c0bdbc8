"""Until its loops are compiled, the planner runs the same loops in plain Python."""

from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_problems import problems, remainders
from recycle_schedules import Problem, plan
from recycle_schedules.compiled import LOOPS, Loops, load
from recycle_schedules.compiled.loops import interruptible
from recycle_schedules.validate import validate

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # such as an integer overflow


@contextmanager
def plain_python(*, patient):
    """Runs the loops in plain Python. patient: search as long as with compiled loops."""
    load()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in vars(Loops()).items():
            patch.setitem(vars(LOOPS), name, function)
        patch.setitem(vars(LOOPS), "compiled", patient)
        yield


@pytest.mark.parametrize("shape", [(3, 4, 6), (4, 8, 16), (16, 8, 16)])
@pytest.mark.parametrize("keys", [{}, {"failed": [(1, 3)]}, {"failed": [(1, 3)], "memory_limit": 6}], ids=str)
def test_the_first_plan_does_not_wait_for_the_compiler_at_any_size(shape, keys):
    with plain_python(patient=False):
        assert validate(plan(Problem(*shape, **keys))) == []


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_plain_python_and_compiled_loops_make_the_same_plan(data):
    problem = data.draw(problems(most_pipelines=3, most_stages=3, most_microbatches=2))
    if data.draw(st.booleans()):
        problem, _ = data.draw(remainders(plan(problem)))
    with plain_python(patient=True):
        slowly = plan(problem)
    assert list(plan(problem).ops) == list(slowly.ops)


@pytest.mark.parametrize(("cause", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (ValueError, SystemError)])
def test_only_ctrl_c_in_compiled_code_raises_keyboard_interrupt(cause, seen):
    def as_numba_raises_it():
        try:
            try:
                raise cause
            except cause as error:
                raise SystemError("_numba_unpickle returned a result with an exception set") from error
        except SystemError as error:
            raise SystemError("the function returned a result with an exception set") from error

    with pytest.raises(seen):
        interruptible(as_numba_raises_it)()
