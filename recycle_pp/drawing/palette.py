"""The colours of every picture, the same in the terminal, in figures and in the page.

    palette.FILL[OpKind.FORWARD], palette.text_on(OpKind.FORWARD)

The fills differ by at least 19 (CIE76) from each other and from both backgrounds, for normal vision, deuteranopia,
protanopia and tritanopia (Machado, Oliveira, Fernandes 2009). The tests check this. Letters, outlines and hatching
repeat all information that colours carry.
"""

from __future__ import annotations

from recycle_schedules import OpKind

FILL = {
    OpKind.FORWARD: "#6DB3EC",
    OpKind.BACKWARD_INPUT: "#E97B2E",
    OpKind.BACKWARD_WEIGHT: "#F9E38A",
    OpKind.BACKWARD: "#1F7F62",
    OpKind.OPTIMIZER: "#6B4C9A",
}
NAMES = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD_INPUT: "backward, input",
    OpKind.BACKWARD_WEIGHT: "backward, weights",
    OpKind.BACKWARD: "backward",
    OpKind.OPTIMIZER: "optimizer",
}
INK = "#14181F"
PAPER = "#FFFFFF"
DEAD = "#8A8F98"  # hatching of dead workers
ALARM = "#B3123A"  # deaths, cut and lost ops
STALL = "#F6D5DC"  # background of the ops during a stall


def text_on(kind: OpKind) -> str:
    """The colour of text on an op: dark on the light fills, white on the dark ones."""
    return PAPER if kind in (OpKind.BACKWARD, OpKind.OPTIMIZER) else INK
