"""The colours of every picture, the same in the terminal, in figures and in the page.

    palette.FILL["F"], palette.text_on("F")

The fills differ by at least 19 (CIE76) from each other and from both backgrounds, for normal vision, deuteranopia,
protanopia and tritanopia (Machado, Oliveira, Fernandes 2009). The tests compute it. Letters, outlines and hatching
repeat all information in colours.
"""

from __future__ import annotations

FILL = {"F": "#6DB3EC", "I": "#E97B2E", "W": "#F9E38A", "B": "#1F7F62", "O": "#6B4C9A"}
NAMES = {
    "F": "forward",
    "I": "backward, input",
    "W": "backward, weights",
    "B": "backward",
    "O": "optimizer",
}
INK = "#14181F"
PAPER = "#FFFFFF"
DEAD = "#8A8F98"  # hatching of dead workers
ALARM = "#B3123A"  # deaths, cut and lost ops
STALL = "#F6D5DC"  # background of the ops, from the death to the last worker's next op


def text_on(kind: str) -> str:
    """The colour of text on an op: dark on the light fills, white on the dark ones."""
    return PAPER if kind in "BO" else INK
