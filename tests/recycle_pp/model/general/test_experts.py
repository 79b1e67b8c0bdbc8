"""Mixtures of experts of transformers: the cost and the gradients of their routed products."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recycle_pp.model.general.source import source_of
from recycle_pp.model.stage_module import Batch
from tests.recycle_pp.in_process import backward, pipeline, sums

from . import models

EXPERTS, TOKENS = 64, 1024


class Largest(TorchDispatchMode):
    """Records the size, in elements, of the largest tensor that any operation creates."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, arguments=(), given=None):
        made = operation(*arguments, **(given or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


def mixtral(tmp_path):
    path = models.folder("mixtral", tmp_path, num_local_experts=EXPERTS, max_position_embeddings=TOKENS)
    return models.of_folder(path, model__sequence=TOKENS // 2)


def batch():
    random = torch.Generator().manual_seed(5)
    inputs, labels = (torch.randint(3, 256, (2, TOKENS // 2), generator=random) for _ in range(2))
    return Batch(inputs, labels)


def test_no_tensor_holds_an_expert_matrix_for_each_token(tmp_path):
    (stage,) = pipeline(mixtral(tmp_path))
    with Largest() as largest:
        stage.forward(3, 2, batch(), [])
        backward([stage], 2)
    parameters = max(parameter.numel() for parameter in stage.parameters.values())  # the experts of one layer
    attention = 2 * 4 * (TOKENS // 2) ** 2  # batch x heads x positions x positions
    assert largest.elements <= max(parameters, attention)


def test_gradients_of_64_experts_equal_those_of_a_loop_over_experts(tmp_path):
    settings = mixtral(tmp_path)
    (stage,) = pipeline(settings)
    (loss,) = stage.forward(3, 2, batch(), [])
    backward([stage], 2)
    source = source_of(settings)
    torch.manual_seed(settings.run.seed)
    model = source.build().train()
    model.config._experts_implementation = "eager"
    expected = source.loss(model, batch(), torch.tensor(float(TOKENS)), batch().labels)
    (expected / 4).backward()
    assert torch.allclose(loss, expected.detach())
    made = sums(stage)
    for name, parameter in model.named_parameters():
        assert torch.allclose(made[name], parameter.grad, rtol=1e-4, atol=1e-7), name
