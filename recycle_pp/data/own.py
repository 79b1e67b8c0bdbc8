"""Samples of a user's own dataset: `data.build=my_package:dataset`.

    samples = OwnSamples(settings)
    samples.ids(first, count); samples.train(number)        # {"pixel_values": ..., "labels": ...}
    together([samples.train(3), samples.train(8)])          # a `Batch`

`my_package.dataset()` returns an object with `__len__` and `__getitem__`. Item i is a mapping from names to tensors. It
must be the same in any process, and the shapes must be the same for every i. If some labels are ignored, the object
also needs `counted(i)`, the number of item i's labels that are not ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.config.settings import Model, Settings

from .batch import IGNORED, Batch
from .order import Order
from .source import Packed
from .user_code import called, function

LOOKED_AT = 16  # samples that determine the fingerprint
Sample = Mapping[str, Tensor]


class OwnSamples:
    """The samples of data.build, with the interface of `samples.Samples`.

    Attributes:
        counts: whether the dataset has `counted`.

    Raises:
        ValueError: the dataset cannot be built, or is too small; the message names the configuration key.
    """

    separator: int | None = None
    packed: Mapping[str, Packed] = {}  # see `Samples`

    def __init__(self, settings: Settings):
        data = settings.data
        assert data.build is not None
        self.name = f"data.build={data.build}"
        self._dataset, self._model = built(data.build), settings.model
        self.counts = hasattr(self._dataset, "counted")
        with called(self.name):
            length = len(self._dataset)
        self.held_outs = int(length * data.validation_share)
        self.windows = length - self.held_outs
        if self.windows < 1:
            raise ValueError(f"{self.name} has {length} samples, of which {self.held_outs} are held out")
        self._length, self._first = length, self.windows
        self._order = Order([self.windows], None, settings.run.seed, settings.islands.cut)
        self.windows //= settings.islands.cut[1]

    def ids(self, first: int, count: int) -> list[int]:
        """The numbers of samples `first` to `first + count - 1` of the run."""
        return [self._order.window(n) for n in range(first, first + count)]

    def train(self, number: int) -> Sample:
        """The tensors of a sample. Like the other methods, raises UserMistake if the dataset raises an exception."""
        with called(f"{self.name}[{number}]"):
            found = self._dataset[number]
            sample = {str(name): torch.as_tensor(value) for name, value in found.items()}
        if self.counts and "labels" not in sample:
            raise UserMistake(
                f"{self.name} has a method `counted`, so its samples must contain a tensor `labels`; they contain "
                f"{', '.join(sample)}"
            )
        if self._model.kind != "custom":
            _check_tokens(sample, self._model, self.name, number)
        return sample

    def held_out(self, number: int) -> Sample:
        return self.train(self._first + number)

    def counted(self, number: int) -> int:
        """Number of labels of a training sample that are not ignored."""
        with called(f"{self.name}: counted({number})"):
            return int(self._dataset.counted(number))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the number of samples and of some of them; equal fingerprints mean the same data."""
        digest, count = hashlib.sha256(str(self._length).encode()), min(self._length, LOOKED_AT)
        for i in range(count):
            for name, tensor in sorted(self.train(i * self._length // count).items()):
                digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def _check_tokens(sample: Sample, model: Model, name: str, number: int) -> None:
    """Raises UserMistake if these are not the tokens and labels of one sample."""
    if sample.keys() != {"input_ids", "labels"}:
        raise UserMistake(f"{name} must return input_ids and labels for model={model.kind}, not {', '.join(sample)}")
    for key, tensor in sample.items():
        if tensor.shape != (model.sequence,) or tensor.dtype != torch.int64:
            wanted = f"({model.sequence},) int64 for model.sequence={model.sequence}"
            found = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            raise UserMistake(f"{name}[{number}]: {key} must be {wanted}, not {found}")
        ignored = tensor == IGNORED if key == "labels" else torch.zeros_like(tensor, dtype=torch.bool)
        wrong = tensor[((tensor < 0) | (tensor >= model.vocabulary)) & ~ignored]
        if len(wrong):
            allowed = f"0 to {model.vocabulary - 1} (model.vocabulary={model.vocabulary})"
            allowed += f" or {IGNORED}" * (key == "labels")
            raise UserMistake(f"{name}[{number}]: {key} must be {allowed}, not {int(wrong[0])}")


def together(samples: Sequence[Sample]) -> Batch:
    """A micro-batch of the samples' stacked tensors. Missing input_ids or labels become an empty tensor, (b, 0)
    int64."""
    try:
        tensors = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    except (RuntimeError, KeyError) as error:
        raise UserMistake(f"data.build: samples have different shapes or names ({error})") from None
    none = torch.zeros(len(samples), 0, dtype=torch.int64)
    return Batch(tensors.pop("input_ids", none), tensors.pop("labels", none), more=tensors)


def blank(settings: Settings) -> Batch:
    """Zeros in the shapes of a micro-batch."""
    sample = {name: torch.zeros_like(tensor) for name, tensor in OwnSamples(settings).train(0).items()}
    return together([sample] * settings.parallel.microbatch_size)


@cache
def built(build: str) -> Any:
    """The dataset that MODULE:FUNCTION returns, built once per process."""
    made = function("data.build", build)
    with called(f"data.build={build}"):
        dataset = made()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(f"data.build={build} must return an object with __len__ and __getitem__, not "
                         f"{type(dataset).__name__}")  # fmt: skip
    return dataset
