"""The origin of a model: `model=custom model.build=my_package:build`, or `model=hf model.path=FOLDER`.

    source = source_of(settings)
    model = source.build()                          # the whole model, in source.dtype
    loss = source.loss(model, batch, items, labels) # loss of the whole model, or of the part that a stage holds

A custom model consists of three values and needs no subclass: `build()` returns an nn.Module, `model.layers` names its
list of layers, and `model.loss` is a function of (output, batch). Arguments of the model's forward are passed by name:
`input_ids`, `labels` (already shifted: `labels[:, t]` follows `input_ids[:, t]`), `num_items_in_batch`, and further
tensors of the data. If the first argument has another name, it gets the inputs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recycle_pp.config.settings import Settings
from recycle_pp.data.user_code import called, first_line, function
from recycle_pp.model.stage_module import Batch
from recycle_pp.model.transformer import stream_dtype

from .lora import inject


class Source(Protocol):
    """A model to train.

    name    name of the model, for messages
    layers  name of the list of layers
    folder  safetensors with the initial values, or None
    prefix  prefix of parameter names that files of the bare model omit
    dtype   dtype of the parameters in the computation
    """

    name: str
    layers: str
    folder: Path | None
    prefix: str
    dtype: torch.dtype

    def build(self, dtype: torch.dtype | None = None, traced: bool = False) -> nn.Module:
        """The whole model.

        dtype: dtype of the parameters; None: `self.dtype`
        traced: whether the model is for a run on fake tensors. If so, torch can derive the result shapes of all its
                operations. Names and shapes of the parameters stay the same."""
        ...

    def loss(self, model: nn.Module, batch: Batch, items: Tensor | None, labels: Tensor) -> Any: ...


def source_of(settings: Settings) -> Source:
    """The source of the configured model. Raises ValueError, with one sentence for the user, if it cannot be used."""
    return Custom(settings) if settings.model.kind == "custom" else HuggingFace(settings)


class Custom:
    """A model that `model.build`, a function of the user's own package, builds. Python also searches the working
    directory for modules."""

    def __init__(self, settings: Settings) -> None:
        model = settings.model
        assert model.build is not None
        self.name = f"model.build={model.build}"
        self.layers = str(model.layers)
        self.folder = model.folder
        self.prefix, self.dtype = "", stream_dtype(settings)
        self._build = function("model.build", model.build)
        self._loss = function("model.loss", model.loss) if model.loss else None

    def build(self, dtype: torch.dtype | None = None, traced: bool = False) -> nn.Module:
        with called(self.name):
            built = self._build()
        if not isinstance(built, nn.Module):
            raise ValueError(f"{self.name} must return an nn.Module, not {type(built).__name__}")
        dtype = dtype or self.dtype
        return built if dtype == torch.float32 else built.to(dtype)  # converts buffers too

    def loss(self, model: nn.Module, batch: Batch, items: Tensor | None, labels: Tensor) -> Any:
        given = {"num_items_in_batch": items, **batch.more}
        given |= {name: of for name, of in (("input_ids", batch.inputs), ("labels", batch.labels)) if of.numel()}
        output = model(**arguments(model, given))
        if self._loss is not None:
            # With these items, the dry run sees whether the loss divides by them.
            return self._loss(output, replace(batch, items=items))  # type: ignore[arg-type]
        return getattr(output, "loss", output)


class HuggingFace:
    """A decoder that transformers builds from a folder with a config.json, with or without weights. Downloads
    nothing."""

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import transformers
        except ImportError as error:
            raise ValueError(
                "model=hf needs transformers: pip install -e '.[hf]' in the clone of recycle_pp"
            ) from error
        model = settings.model
        assert model.folder is not None
        self.name = f"model.path={model.path}"
        try:
            self.config = transformers.AutoConfig.from_pretrained(model.folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{self.name}: no configuration that transformers knows ({first_line(error)})") from error
        if getattr(self.config, "is_encoder_decoder", False):
            raise ValueError(f"{self.name} is an encoder-decoder; only decoders can be trained")
        if type(self.config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"{self.name}: transformers has no causal language model for {self.config.model_type}")
        self.config.use_cache = False
        self.dtype = stream_dtype(settings)
        self._class, self._model = transformers.AutoModelForCausalLM, model
        self.folder = None if model.init == "random" else model.folder
        with torch.device("meta"):
            whole = self.build()
        if settings.data.masked and "position_ids" not in inspect.signature(type(whole).forward).parameters:
            raise ValueError(f"{settings.data.unmasked}: {type(whole).__name__} takes no position_ids")
        self.prefix = getattr(whole, "base_model_prefix", "")
        self.ignored: Collection[str] = whole._keys_to_ignore_on_load_unexpected or ()  # type: ignore[assignment]
        self.layers = model.layers if isinstance(model.layers, str) else self._find_layers(whole)

    def build(self, dtype: torch.dtype | None = None, traced: bool = False) -> nn.Module:
        # With both implementations every expert gets a gradient, whatever the router chooses. `grouped_mm` computes one
        # product per expert, over the tokens that chose it. `batched_mm` copies the matrices of an expert for every
        # token. While the model is traced without values, torch can derive the shapes of `batched_mm` in every
        # dtype, but those of `grouped_mm` only in bf16.
        experts = {"experts_implementation": "batched_mm" if traced else "grouped_mm"}
        given = experts if _has_experts(self.config) else {}
        model = self._class.from_config(self.config, dtype=dtype or self.dtype, **given)
        if self._model.lora.rank:
            inject(model, self._model)
        return model

    def loss(self, model: nn.Module, batch: Batch, items: Tensor | None, labels: Tensor) -> Any:
        """The model's own loss. The argument `labels` only makes the model compute a loss; the shifted labels are
        passed as `shift_labels`."""
        # drops document_ids, because position_ids already distinguish documents
        more = {name: tensor for name, tensor in batch.more.items() if name != "document_ids"}
        given = {"shift_labels": batch.labels, "num_items_in_batch": items, "use_cache": False, **more}
        return model(input_ids=batch.inputs, labels=labels, **given).loss

    def _find_layers(self, whole: nn.Module) -> str:
        text = self.config.get_text_config()
        count = getattr(text, "num_hidden_layers", None)
        found: list[str] = []
        for name, module in whole.named_modules():
            inside = any(name.startswith(f"{other}.") for other in found)  # such as a layer's list of experts
            if isinstance(module, nn.ModuleList) and len(module) == count and not inside:
                found.append(name)
        if len(found) != 1:
            which = " and ".join(found) or "no list"
            raise ValueError(
                f"{self.name}: model.layers must name the list of its layers: {which} "
                f"{'have' if found else 'has'} {count} modules"
            )
        return found[0]


def arguments(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `given` that the model's forward takes by name. If the forward's first argument has no entry, it
    gets `input_ids`. Raises ValueError if any other argument has neither an entry nor a default."""
    parameters = inspect.signature(type(model).forward).parameters
    names = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
    taken = {name: value for name, value in given.items() if name in names}
    if names and names[0] not in taken and "input_ids" in given:
        taken[names[0]] = given["input_ids"]
    if missing := [name for name in names if name not in taken and parameters[name].default is inspect.Parameter.empty]:
        raise ValueError(f"its forward takes {missing[0]}, but the data contain only {', '.join(given)}")
    return taken


def _has_experts(config: Any) -> bool:
    return any("expert" in key for key in config.get_text_config().to_dict())
