"""A module whose build, forward or loss fails, as a user's code may. `MODE` in the environment selects which one."""

import os

import torch
from torch import nn
from torch.nn import functional as F

MODE = os.environ.get("MODE", "")


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        if MODE == "build":
            raise KeyError("no such size")
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        if MODE == "forward":
            x = x @ torch.zeros(3, 3)  # wrong size
        if MODE == "values" and x.sum() > 0:
            x = x + 1
        return self.head(x).float()


def loss(output, batch):
    if MODE == "loss":
        return F.cross_entropy(output, batch.targets)
    if MODE == "step":
        refuse_real_values(output)
    return F.cross_entropy(output.flatten(0, 1), batch.labels.flatten())


def refuse_real_values(output):
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(output, FakeTensor):
        raise ArithmeticError("such logits cannot be")


def shifted(output, batch):
    """Shifts labels in the loss, like Hugging Face's models."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())


def without_the_last(output, batch):
    """Drops the last position of outputs and labels: wasteful but correct."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch.labels[:, :-1].flatten())
