"""The table of op kinds: every property that depends on the kind of an op or of a message.

    OpKind.BACKWARD == "B", OpKind("B").adds_gradient     # a kind is its letter, as in files and messages
    KINDS[W] is OpKind.BACKWARD_WEIGHT, OpKind.FORWARD.code == F
    OpKind.FORWARD.makes.step == 1                        # an activation goes to the next stage

Files, settings and messages between processes contain letters. Flat arrays contain codes. `OpKind(letter)` and
`KINDS[code]` convert them. All other code uses the properties of the kind.
"""

from __future__ import annotations

from enum import StrEnum


class TensorKind(StrEnum):
    """A kind of boundary tensor: what one micro-batch sends across a stage boundary in one direction.

    step   number of the receiving stage minus number of the producing stage: 1 or -1
    code   position of the kind in this table, from 0"""

    step: int
    code: int

    def __new__(cls, letter: str, step: int) -> TensorKind:
        kind = str.__new__(cls, letter)
        kind._value_ = letter
        kind.step = step
        kind.code = len(cls.__members__)
        return kind

    __repr__ = str.__repr__

    ACTIVATION = "F", 1
    GRADIENT = "B", -1


class OpKind(StrEnum):
    """A kind of op or of message, in the notation of torch.distributed.pipelining.

    takes               kind of the boundary tensor that the op needs, None if it needs none
    makes               kind of the boundary tensor that the op provides, None if it provides none
    computes            whether the op computes a forward or backward of one micro-batch
    adds_gradient       whether the op may add to the weight gradients of its stage. `I` adds the gradients that are not
                        deferred to `W`, for example those of norm weights
    completes_gradient  whether the micro-batch's gradient at the stage is complete after the op
    recomputes          whether the op repeats the `F` first, at stages that recompute their layers
    code                position of the kind in this table, from 0"""

    takes: TensorKind | None
    makes: TensorKind | None
    computes: bool
    adds_gradient: bool
    completes_gradient: bool
    recomputes: bool
    code: int

    def __new__(
        cls,
        letter: str,
        takes: TensorKind | None = None,
        makes: TensorKind | None = None,
        computes: bool = False,
        adds_gradient: bool = False,
        completes_gradient: bool = False,
        recomputes: bool = False,
    ) -> OpKind:
        kind = str.__new__(cls, letter)
        kind._value_ = letter
        kind.takes = takes
        kind.makes = makes
        kind.computes = computes
        kind.adds_gradient = adds_gradient
        kind.completes_gradient = completes_gradient
        kind.recomputes = recomputes
        kind.code = len(cls.__members__)
        return kind

    __repr__ = str.__repr__

    # fmt: off
    #                 letter    takes                  makes                  computes  adds   completes  recomputes
    FORWARD         = "F",      TensorKind.ACTIVATION, TensorKind.ACTIVATION, True,     False, False,     False
    BACKWARD_INPUT  = "I",      TensorKind.GRADIENT,   TensorKind.GRADIENT,   True,     True,  False,     True
    BACKWARD_WEIGHT = "W",      None,                  None,                  True,     True,  True,      False
    BACKWARD        = "B",      TensorKind.GRADIENT,   TensorKind.GRADIENT,   True,     True,  True,      True
    OPTIMIZER       = "O"
    SEND_ACTIVATION = "SEND_F", TensorKind.ACTIVATION, None
    SEND_GRADIENT   = "SEND_B", TensorKind.GRADIENT,   None
    RECV_ACTIVATION = "RECV_F", None,                  TensorKind.ACTIVATION
    RECV_GRADIENT   = "RECV_B", None,                  TensorKind.GRADIENT
    REDUCE          = "REDUCE"
    # fmt: on

    def frees(self, i_release: float) -> float:
        """The share of a micro-batch's memory that becomes free when the op ends. i_release: that share for an `I`."""
        if self is OpKind.BACKWARD_INPUT:
            return i_release
        if self is OpKind.BACKWARD_WEIGHT:
            return 1.0 - i_release
        return 1.0 if self is OpKind.BACKWARD else 0.0


F, I, W, B, O = range(5)
"""Codes of the kinds in flat arrays."""
KINDS = (
    OpKind.FORWARD,
    OpKind.BACKWARD_INPUT,
    OpKind.BACKWARD_WEIGHT,
    OpKind.BACKWARD,
    OpKind.OPTIMIZER,
)
"""The op kinds that occur in plans, indexed by code. All other kinds occur only in action lists."""
COMPUTE = tuple(kind for kind in KINDS if kind.computes)
SPLIT = (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
"""The ops of one micro-batch at one stage if its backward is split."""
WHOLE = (OpKind.FORWARD, OpKind.BACKWARD)
"""The ops of one micro-batch at one stage if its backward is one op."""
