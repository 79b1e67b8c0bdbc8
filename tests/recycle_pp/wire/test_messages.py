"""The table of messages: each message arrives unchanged, and only its receiver accepts it."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.wire.frames import Malformed, encode_body
from recycle_pp.wire.messages import (
    agreement,
    ctl,
    generations,
    handshake,
    health,
    islands,
    lifecycle,
    machines,
    saving,
    states,
    steps,
    supervisors,
    workers,
)
from recycle_pp.wire.messages.steps import Commit, Measured, Vote
from recycle_pp.wire.messages.table import MESSAGES, Message, Vocabulary, is_lasting, is_void
from recycle_pp.wire.messages.workers import FROM_WORKER, LASTING, State

from .any_message import any_message

MODULES = (
    agreement,
    ctl,
    generations,
    handshake,
    health,
    islands,
    lifecycle,
    machines,
    saving,
    states,
    steps,
    supervisors,
    workers,
)
VOCABULARIES = {
    (sender, receiver): Vocabulary(sender, receiver) for sender, receiver in {rule[:2] for rule in MESSAGES.values()}
}
every = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)


def test_every_class_is_in_the_table_and_no_two_share_a_name_or_a_tag():
    classes = [
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    ]
    assert set(classes) == set(MESSAGES)
    assert len({kind.__struct_config__.tag for kind in MESSAGES}) == len(MESSAGES)
    assert all(kind.__struct_config__.frozen for kind in MESSAGES)


@every
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_message_arrives_unchanged(kind, data):
    message = data.draw(any_message(kind))
    rule = MESSAGES[kind]
    arrived = VOCABULARIES[rule.sender, rule.receiver].decode(encode_body(message))
    assert type(arrived) is kind and arrived == message


@every
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_message_from_another_role_is_rejected(kind, data):
    body, rule = encode_body(data.draw(any_message(kind))), MESSAGES[kind]
    for (sender, receiver), vocabulary in VOCABULARIES.items():
        if (sender, receiver) != (rule.sender, rule.receiver):
            with pytest.raises(Malformed, match=f"not a message of a {sender} to a {receiver}: "):
                vocabulary.decode(body)


@given(st.binary(max_size=200))
def test_garbage_is_rejected_in_one_sentence(body):
    with pytest.raises(Malformed, match="not a message of a worker to a coordinator: "):
        FROM_WORKER.decode(body)


@every
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_truncated_messages_and_unknown_fields_are_rejected(kind, data):
    body = encode_body(data.draw(any_message(kind)))
    vocabulary = VOCABULARIES[MESSAGES[kind].sender, MESSAGES[kind].receiver]
    more = msgspec.msgpack.encode(msgspec.msgpack.decode(body, strict=False) | {"and": 1})
    for wrong in (body[: data.draw(st.integers(0, len(body) - 1))], body + b"\0", more):
        with pytest.raises(Malformed):
            vocabulary.decode(wrong)


def test_nan_and_inf_arrive_unchanged():
    vote = Vote(3, 7, finite=False, fits=True, wrong=[], digest=b"", squares=[math.nan, math.inf], losses=[-math.nan])
    arrived = FROM_WORKER.decode(encode_body(vote))
    assert math.isnan(arrived.squares[0]) and math.isinf(arrived.squares[1]) and math.isnan(arrived.losses[0])


def test_messages_of_another_generation_are_void_and_those_without_a_generation_never_are():
    of_generation = Vote(3, 7, finite=True, fits=True, wrong=[], digest=b"", squares=[], losses=[])
    assert not is_void(of_generation, 3) and is_void(of_generation, 4) and is_void(of_generation, 2)
    assert not is_void(Commit(3, 7, scale=1.0, norm=1.0, loss=1.0), 4), "a commit is final"


def test_messages_that_outlive_a_coordinator_are_valid_in_any_generation():
    """Workers send them again to the next coordinator."""
    assert not any(MESSAGES[kind].of_generation for kind in LASTING)
    measured = Measured(7, b"spans", [1, 2], 0, 1e-4, 0.5)
    assert is_lasting(measured)
    state = State(3, {1: Worker(0, 1)}, None, 6, None, [measured])
    assert FROM_WORKER.decode(encode_body(state)) == state


def test_the_kind_is_the_class_name_in_snake_case():
    assert saving.SaveFailed.__struct_config__.tag == "save_failed"
    assert msgspec.msgpack.decode(encode_body(supervisors.Finish(3))) == {"type": "finish", "code": 3, "reason": ""}
