"""Imports transformers and peft in a zygote (see Zygote.preload), so that no worker of a job imports them again."""

import importlib

import peft  # noqa: F401
import transformers  # noqa: F401

for kind in ("gpt2", "llama", "qwen2"):  # transformers imports an architecture on its first use
    importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
