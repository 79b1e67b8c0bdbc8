"""Low-rank adapters of a Hugging Face decoder, through peft.

    inject(model, settings.model)            # in place: adapters are trainable, all other parameters are frozen
    values = Adapted(folder, drawn(model_without_adapters, settings.model, seed))   # initial values of both

An adapted module keeps its name. Its own parameters are called `q_proj.base_layer.weight`, those of its adapter
`q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recycle_pp.config.settings import Model
from recycle_pp.model.safetensors_folder import Folder


def inject(model: nn.Module, of: Model) -> None:
    """Adds adapters to the model, with the dtype of the adapted weights. Raises ValueError, with one sentence for the
    user, if peft is not installed or a module in `model.lora.targets` cannot be adapted."""
    config, targets = peft_config(of), of.lora.targets
    for target in targets if isinstance(targets, list) else ():
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            raise ValueError(f"model.lora.targets: no module of {type(model).__name__} is called {target}")
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    _inject(config, model)
    from peft.tuners.lora import Linear

    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        if type(module) is not Linear:
            raise ValueError(f"model.lora.targets: {name} is not a linear module")
        weight: Any = module.get_base_layer().weight
        if weight is embedding:
            raise ValueError(f"model.lora.targets: {name} shares its weights with the embedding")
        for adapter in (module.lora_A, module.lora_B):
            adapter.to(weight.dtype)  # peft itself does this, except for weights on `meta`


def drawn(model: nn.Module, of: Model, seed: int) -> dict[str, Tensor]:
    """Name -> initial value of each adapter's matrix, float32, as peft draws them after `torch.manual_seed(seed)`.

    model: the model without adapters and without memory; cannot be used afterwards"""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:  # a CPU placeholder, because peft moves adapters to the device of the weights
                module._parameters[name] = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _inject(peft_config(of), model)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


class Adapted:
    """`initial_values.Values` of a model with adapters."""

    def __init__(self, folder: Folder, adapters: Mapping[str, Tensor]) -> None:
        self._folder, self._adapters = folder, adapters

    def read(self, name: str) -> Tensor:
        return self._adapters[name] if name in self._adapters else self._folder.read(in_folder(name))

    def find(self, name: str) -> Tensor | None:
        return self._adapters[name] if name in self._adapters else self._folder.find(in_folder(name))


def in_folder(name: str) -> str:
    """The name of a parameter in the folder of the model without adapters."""
    return name.replace(".base_layer.", ".")


def peft_config(of: Model) -> Any:
    """peft's LoraConfig for this model. Raises ValueError if peft is not installed."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("model.lora needs peft: pip install -e '.[lora]' in the clone of recycle_pp") from error
    lora = of.lora
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=lora.targets,
        lora_dropout=lora.dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=of.path,
    )


def _inject(config: Any, model: nn.Module) -> None:
    from peft import inject_adapter_in_model

    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(f"model.lora.targets: {error}") from error
