"""Valid and invalid datasets for tests of data.build."""

import numpy as np
import torch

HERE = __name__


class Tokens:
    """Sequences that count upwards. Up to 12 of the 16 labels are ignored, depending on the sample's number."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        tokens = (torch.arange(17) + i) % 250
        labels = tokens[1:].clone()
        labels[: 1 + i % 12] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


class Counted(Tokens):
    def counted(self, i):
        return 15 - i % 12


class Mixed:
    """Samples that consist of an array and numbers."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"sound": np.full((3, 2), i, np.float32), "loud": i > 4, "labels": i}


class Fails(Mixed):
    def __getitem__(self, i):
        if i == 7:
            raise OSError("no such picture")
        return super().__getitem__(i)


class Uneven(Mixed):
    def __getitem__(self, i):
        return {"sound": torch.zeros(1 + i)}


class Targets(Counted):
    """Counted labels under a different name."""

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        return {"input_ids": sample["input_ids"], "targets": sample["labels"]}


class Changed(Tokens):
    """The samples of `Tokens`, with the last one changed."""

    def __init__(self, change):
        self.change = change

    def __getitem__(self, i):
        sample = super().__getitem__(i)
        return sample if i < 39 else sample | self.change(**sample)


def nothing():
    return 3


def tokens():
    return Tokens()


def counted():
    return Counted()


def targets():
    return Targets()


def mixed():
    return Mixed()


def fails():
    return Fails()


def uneven():
    return Uneven()


def short():
    return Changed(lambda input_ids, labels: {"input_ids": input_ids[:8], "labels": labels[:8]})


def int32():
    return Changed(lambda input_ids, labels: {"labels": labels.int()})


def large():
    return Changed(lambda input_ids, labels: {"input_ids": input_ids + 250})


def ignored_input():
    return Changed(lambda input_ids, labels: {"input_ids": labels})


def negative():
    return Changed(lambda input_ids, labels: {"labels": labels.clamp(-1)})
