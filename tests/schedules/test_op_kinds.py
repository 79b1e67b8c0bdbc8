"""The table of op kinds."""

import json
import pickle

import msgspec
import pytest
from recycle_schedules import KINDS, Action, OpKind, TensorKind, Worker
from recycle_schedules.op_kinds import COMPUTE, SPLIT, WHOLE, B, F, I, O, W
from recycle_schedules.ops import input_of, output_of


def test_a_kind_is_its_letter_in_files_and_messages() -> None:
    for kind in OpKind:
        assert kind == str(kind) == OpKind(str(kind)) and repr(kind) == repr(str(kind)) and {str(kind): 1}[kind] == 1
        assert json.loads(json.dumps({kind: kind})) == {str(kind): str(kind)}
        assert msgspec.msgpack.decode(msgspec.msgpack.encode({kind: kind})) == {str(kind): str(kind)}
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_codes_are_positions_in_the_table() -> None:
    assert [kind.code for kind in OpKind] == list(range(len(OpKind)))
    assert [KINDS[code] for code in (F, I, W, B, O)] == list("FIWBO") and tuple(OpKind)[: len(KINDS)] == KINDS
    assert [kind.code for kind in TensorKind] == [0, 1]


def test_both_forms_of_a_backward_have_the_same_effect() -> None:
    """In either form, memory is freed once, the gradient is completed once, and each boundary tensor is sent once."""
    assert "".join(COMPUTE) == "FIWB"
    for ops in (SPLIT, WHOLE):
        assert sum(kind.frees(0.25) for kind in ops) == 1 and sum(kind.completes_gradient for kind in ops) == 1
        assert [kind.makes for kind in ops if kind.makes] == list(TensorKind)
        assert sum(kind.recomputes for kind in ops) == 1


@pytest.mark.parametrize("kind", COMPUTE)
def test_an_op_takes_the_tensor_that_the_adjacent_stage_makes(kind: OpKind) -> None:
    taken = [input_of(kind, (0, 1), stage, 3) for stage in range(3)]
    made = [output_of(kind, (0, 1), stage, 3) for stage in range(3)]
    assert sorted(filter(None, taken)) == sorted(filter(None, made))
    assert len(list(filter(None, made))) == (2 if kind.makes else 0)


def test_a_send_and_its_receive_name_the_same_tensor() -> None:
    here, there = Worker(0, 1), Worker(0, 2)
    activation = (TensorKind.ACTIVATION, (0, 3), 1)
    assert Action(OpKind.SEND_ACTIVATION, 1, (0, 3), there).tensor == activation
    assert Action(OpKind.RECV_ACTIVATION, 2, (0, 3), here).tensor == activation
    gradient = (TensorKind.GRADIENT, (0, 3), 2)
    assert Action(OpKind.SEND_GRADIENT, 2, (0, 3), here).tensor == gradient
    assert Action(OpKind.RECV_GRADIENT, 1, (0, 3), there).tensor == gradient
