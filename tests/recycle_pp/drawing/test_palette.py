"""Colours that are distinct for all kinds of colour vision."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from recycle_schedules import KINDS

from recycle_pp.drawing import palette

# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB
VISION = {
    "normal": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    t = XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_every_kind_of_op_has_a_colour_and_a_name() -> None:
    assert tuple(palette.FILL) == tuple(palette.NAMES) == KINDS


@pytest.mark.parametrize("vision", VISION)
def test_the_kinds_differ_from_each_other_and_from_both_backgrounds(vision: str) -> None:
    seen = {k: lab(np.array(VISION[vision]) @ linear(c)) for k, c in palette.FILL.items()}
    seen |= {"light": lab(linear(palette.PAPER)), "dark": lab(linear(palette.INK))}
    apart = {a + b: float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(seen, 2)}
    assert min(apart.values()) >= 19, min(apart, key=lambda k: apart[k])


@pytest.mark.parametrize("kind", palette.FILL)
def test_text_on_an_op_has_the_contrast_required_by_wcag(kind: str) -> None:
    fill, text = (float(linear(c) @ XYZ[1]) for c in (palette.FILL[kind], palette.text_on(kind)))
    assert (max(fill, text) + 0.05) / (min(fill, text) + 0.05) >= 4.5
