"""The positions of tensors in a stage's vector, and the units that norms and exponents are computed for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.config.settings import Optimizer
from recycle_pp.numerics import torch_operations as reference
from recycle_pp.numerics.gradients import Gradients
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.update_rules.adamw import AdamW
from tests.recycle_pp.in_process import CPU

SHAPES = st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=5)


@given(SHAPES, st.integers(1, 3000))
def test_units_are_whole_rows_at_256_bytes_and_do_not_depend_on_the_other_tensors(shapes, block):
    layout = Layout({str(k): shape for k, shape in enumerate(shapes)}, lambda *_: block)
    flat = layout.zeros(CPU, torch.bfloat16)
    (part,) = flat.parts
    for mark, of in enumerate(layout.units_of(flat), 1):
        assert of.data_ptr() % 256 == 0 and not of.any()
        of.fill_(mark % 100 + 1)
    assert part.count_nonzero() == sum(view.numel() for view in layout.views(flat))
    assert sum(layout.unit_sizes) == layout.size
    for k, shape in enumerate(shapes):
        alone = Layout({"alone": shape}, lambda *_: block)
        assert [b.rows for b in alone.units] == [b.rows for b in layout.units if b.tensor == k]
        assert alone.rows == [layout.rows[k]]


@pytest.mark.parametrize(("shape", "rows"), [((50_304, 768), 1365), ((3000, 1000), 1040), ((768,), 1), ((2**21,), 1)])
def test_adamw_has_units_of_about_a_million_elements(shape, rows):
    *before, last = Layout({"weight": shape}, lambda *_: AdamW(Optimizer()).unit_size).units
    assert {unit.length for unit in before} <= {rows} and last.length <= rows


@given(SHAPES, st.sets(st.sampled_from("01234")), st.integers(1, 3000))
def test_the_optimizer_may_keep_tensors_whole(shapes, whole, block):
    named = {str(k): shape for k, shape in enumerate(shapes)}
    layout = Layout(named, lambda name, *_: None if name in whole else block)
    for k, rows in enumerate(layout.rows):
        found = [unit.rows for unit in layout.units if unit.tensor == k]
        assert found == (
            [slice(0, rows)] if str(k) in whole else [b.rows for b in Layout({"": shapes[k]}, lambda *_: block).units]
        )
    for first in range(len(layout.units)):
        assert layout.part(range(first, len(layout.units))).unit_sizes == layout.unit_sizes[first:]


def test_norms_and_exponents_belong_to_units():
    """The holder of a unit can compute both without the tensor's other units."""
    whole = Layout({"head.weight": (64, 32), "norm.weight": (32,)}, lambda *_: 32 * 16)
    part = Layout({"head.weight": (16, 32)}, lambda *_: 32 * 16)
    assert [b.rows for b in whole.units] == [slice(k, k + 16) for k in (0, 16, 32, 48)] + [slice(0, 1)]
    grad = torch.randn(64, 32) * torch.logspace(-8, 4, 64).unsqueeze(1)

    def of(layout, grad):
        worker = Gradients(layout, 6, CPU, reproducible=True, ops=reference)
        for _ in range(2):  # the second time with exponents from the gradient
            worker.clear()
            worker.add("head.weight", grad)
            if len(layout.names) > 1:
                worker.add("norm.weight", torch.ones(32))
            result = worker.reduced(worker.payload())
            worker.follow(result)
        return worker, result

    worker, reduced = of(whole, grad)
    assert len(reduced.squares) == 5
    for k in range(4):
        rows = slice(16 * k, 16 * k + 16)
        alone, piece = of(part, grad[rows])
        assert torch.equal(whole.views(reduced.flat)[0][rows], part.views(piece.flat)[0])
        assert reduced.squares[k] == piece.squares[0]
        assert torch.equal(worker.exponents[rows], alone.exponents) and len(alone.exponents.unique()) == 1
    assert len(worker.exponents.unique()) > 3


def test_every_tensor_of_a_layout_begins_at_256_bytes_and_the_gaps_stay_empty():
    layout = Layout({"embedding.weight": (9, 5), "norm.weight": (5,), "head.weight": (9, 5)}, lambda *_: None)
    flat = layout.vector(CPU)
    views = layout.views(flat)
    assert [tuple(view.shape) for view in views] == [(9, 5), (5,), (9, 5)]
    assert all(view.data_ptr() % 256 == 0 for view in views)
    for number, view in enumerate(views, 1):
        view.fill_(number)
    assert flat.count_nonzero() == sum(view.numel() for view in views)
    assert [view.unique().tolist() for view in views] == [[1.0], [2.0], [3.0]]


def test_each_layer_has_its_own_memory_with_the_layout_of_the_vector():
    shapes = {"embedding": (9, 5), "layers.3.norm": (5,), "layers.3.weight": (70, 16), "layers.4.norm": (5,)}
    layout = Layout(shapes, lambda *_: 128, layers=[-1, 3, 3, 4])
    memory, vector = layout.zeros(CPU), layout.vector(CPU)
    assert [[layout.names[layout.units[unit].tensor] for unit in layer] for layer in layout.layers.values()] == [
        ["embedding"],
        ["layers.3.norm", *["layers.3.weight"] * 9],
        ["layers.4.norm"],
    ]
    for number, (mine, whole) in enumerate(zip(layout.views(memory), layout.views(vector), strict=True), 1):
        mine.fill_(number)
        whole.fill_(number)
    assert torch.equal(memory.joined(), vector) and len(memory.parts) == 3
    assert all(
        torch.equal(memory[span], vector[span]) for span in [*layout.spans, *map(layout.span, layout.layers.values())]
    )
    with pytest.raises(AssertionError, match="several layers"):
        memory[slice(layout.spans[0].start, layout.spans[1].stop)]
