"""Checks, when a worker of an island starts, that its layers and initial weights match those of the other islands, and
finds its position.

position = opened(store, settings, tensors, position, origin)      # raises ValueError, with one sentence
"""

from __future__ import annotations

import hashlib

import torch

from recycle_pp.config.settings import Settings
from recycle_pp.numerics.layer_tensors import LayerTensors
from recycle_pp.numerics.layout import Layout
from recycle_pp.storage.store import Store
from recycle_pp.wire.messages.islands import OuterState

from . import objects, rounds
from .fragments import takes_part


def opened(
    store: Store, settings: Settings, tensors: LayerTensors, position: OuterState | None, origin: str | None = None
) -> OuterState:
    """The position to start from.

    tensors   the tensors of the worker's stage
    position  the position in the checkpoint; None at the first start of an island
    origin    if the worker has its initial weights: the digest of its frozen parameters, or ""; else None

    Raises ValueError, with one sentence, if the island does not match the others, or if the store cannot be used.
    """
    assert settings.islands.name is not None
    me, layout, fragments = settings.islands.name, tensors.layout, settings.islands.fragments
    _refuse_ties(tensors)
    _refuse_empty_rounds(tensors, fragments)
    for layer, units in layout.layers.items():
        store.put_if_absent(objects.layout_path(layer, len(units), layout_digest(layout, layer)), me.encode())
    view = objects.View.of(store.objects(), fragments)
    for layer in layout.layers:
        if len(view.digests[layer]) > 1:
            raise ValueError(f"islands.store={store.url}: {_other_layout(store, layer)}")
    if origin is not None:
        _refuse_other_weights(store, tensors, origin)
    return OuterState() if position is None else _with_mine(store, view, me, position)


def layout_digest(layout: Layout, layer: int) -> bytes:
    """16 bytes that identify the names and sizes of the units of a layer."""
    return hashlib.blake2b(repr(layout.described[layer]).encode(), digest_size=16).digest()


def _refuse_ties(tensors: LayerTensors) -> None:
    borrows = getattr(tensors, "borrows", lambda name: False)
    if any(borrows(name) for name in tensors.layout.names):
        raise ValueError("islands.store needs a model without weights that several stages share")


def _refuse_empty_rounds(tensors: LayerTensors, fragments: int) -> None:
    layers = max(tensors.layout.layers, default=0)  # in the last stage, which contains the part after all layers
    if getattr(tensors, "last", False) and fragments > layers:
        raise ValueError(f"islands.fragments must be at most {layers}, the number of layers, not {fragments}")
    module = getattr(tensors, "module", None)
    if fragments == 1 or module is None:
        return
    trained = [layer for layer in range(-1, module.depth + 1) if module.shapes_of(layer)]
    for number in range(fragments):
        if not any(takes_part(layer, number, fragments) for layer in trained):
            raise ValueError(
                f"islands.fragments={fragments} would have a round without a trained parameter, because only the "
                f"layers {trained} of -1 to {module.depth} have one; choose a smaller number"
            )


def _refuse_other_weights(store: Store, tensors: LayerTensors, origin: str) -> None:
    """Compares the initial weights with the digests that the first island wrote, because all islands must begin with
    the same theta. First rounds the weights to bfloat16: with bf16 and sharded state, a worker has only such weights.
    """
    for layer, weights in zip(tensors.layout.layers, tensors.flat.parts, strict=True):
        digest = hashlib.blake2b(weights.cpu().bfloat16().view(torch.int16).numpy().data, digest_size=16)
        digest.update(origin.encode())
        if not store.put_if_absent(objects.weights_path(layer), digest.hexdigest().encode()):
            raise ValueError(
                f"the initial weights of layer {layer} differ from those of the first island in {store.url}; all "
                "islands need the same initial weights"
            )


def _other_layout(store: Store, layer: int) -> str:
    paths = [path for path in store.list(objects.LAYOUT) if path.startswith(f"{objects.LAYOUT}/{layer}.")]
    names = sorted(store.get(path).decode() for path in paths)
    return f"the islands {rounds.names(names)} have different models: the tensors of layer {layer} differ"


def _with_mine(store: Store, view: objects.View, me: str, position: OuterState) -> OuterState:
    """The position, with the deltas that an earlier start of this island left in the store (`OuterState.mine`)."""
    mine = {}
    for number in sorted({*view.closed, *view.delivered}):
        if number < position.applied:
            continue
        share = None
        if number in view.closed:
            share = rounds.closing_of(store.get(objects.closed_path(number))).get(me)
        elif me in view.delivered[number]:
            share = rounds.Share(view.delivered[number][me].steps, 0)
        if share is not None:
            mine[number] = share.steps
    sent = position.sent if mine.get(position.applied) == position.sent else None
    return OuterState(position.applied, position.begun, sent, mine)
