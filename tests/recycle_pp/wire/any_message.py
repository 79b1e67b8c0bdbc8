"""Hypothesis strategies for messages.

any_message(Vote)     # a strategy for all messages of that class
"""

from functools import cache
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from recycle_pp.config.settings import Settings

_PLAIN = {
    int: st.integers(-1, 2**40),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
    Settings: st.just(Settings()),
}


@cache
def any_message(kind):
    return st.builds(kind, **{name: _values(hint) for name, hint in get_type_hints(kind, include_extras=True).items()})


@cache
def _values(hint):
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is Annotated:  # a nonce
        return st.binary(min_size=32, max_size=32)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(_values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(_values(arguments[0]), _values(arguments[1]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(_values, arguments))
    if arguments:  # a union
        return st.one_of(*map(_values, arguments))
    assert issubclass(hint, msgspec.Struct | tuple), hint
    return any_message(hint)
