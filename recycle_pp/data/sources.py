"""The token sources of a configuration, in any format.

    sources = training(settings); sources = validation(settings)      # [] without data.validation_path

The path selects the format:

- None: the source files of Python.
- PREFIX.idx with PREFIX.bin: Megatron's format. Any other .bin: bare tokens.
- Anything else is text. With data.tokenizer it is tokenised once, into a file in `cache_folder()`. Without
  data.tokenizer the raw bytes are the tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from recycle_pp.config.settings import Data, Settings

from . import megatron, raw_text, token_file
from .documents import Corpus
from .source import TokenSource
from .tokenization import Recipe, Report, tokenise
from .tokenizer import load

Reporter = Callable[[str, Report], None]  # name of the source, progress


def training(settings: Settings, report: Reporter | None = None) -> list[TokenSource]:
    """The sources of data.path. Raises ValueError with a sentence that names the configuration key."""
    named: list[str | None] = [*paths(settings.data.path)]
    return [_open(settings, "data.path", path, report) for path in named or [None]]


def validation(settings: Settings, report: Reporter | None = None) -> list[TokenSource]:
    """The sources of data.validation_path. Raises ValueError with a sentence that names the configuration key."""
    key = "data.validation_path"
    return [_open(settings, key, path, report) for path in paths(settings.data.validation_path)]


def paths(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else value


def untokenised(settings: Settings) -> int:
    """Number of bytes of text that must be tokenised before the first step."""
    data, size = settings.data, 0
    for path in paths(data.path) + paths(data.validation_path):
        if data.tokenizer is not None and is_text(path):
            recipe = _recipe(data, path)
            size += 0 if cached(recipe).exists() else sum(recipe.corpus.sizes)
    return size


def separator(data: Data, found: Sequence[TokenSource]) -> int | None:
    """The token that follows every document of all sources; None without data.document_mask.

    A file of `recycle_pp.tokenize` names this token. For other files data.tokenizer determines it. Raises ValueError if
    the token is unknown, or differs between sources.
    """
    if not data.document_mask:
        return None
    said: dict[int, str] = {}
    for source in found:
        token = source.separator
        if token is None and data.tokenizer is not None and data.path is not None:
            token = load(data.tokenizer, data.separator).separator
        if token is None:
            raise ValueError(
                f"data.document_mask must be false: {source.name} does not say which token separates its documents; "
                "data.tokenizer says it (for text: bytes will do)"
            )
        said[token] = source.name
    if len(said) > 1:
        texts = [f"token {token} in {name}" for token, name in said.items()]
        raise ValueError(f"data.document_mask must be false: documents are separated by {' and by '.join(texts)}")
    return next(iter(said))


def needs_preparation(data: Data) -> bool:
    """Whether the data must be tokenised or checked before the workers start. False for a single file or folder of
    bytes or bare tokens."""
    if data.document_mask:
        return True
    if data.path is None:
        return data.validation_path is not None
    return (
        isinstance(data.path, list)
        or data.validation_path is not None
        or (data.tokenizer is not None and is_text(data.path))
        or megatron.find(data.path) is not None
        or token_file.sidecar(data.path).exists()
    )


def is_text(path: str) -> bool:
    return megatron.find(path) is None and not path.endswith(".bin")


def cached(recipe: Recipe) -> Path:
    """Path of the tokenised text."""
    return cache_folder() / f"{recipe.digest}.bin"


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/recycle_pp/tokens, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recycle_pp" / "tokens"


def _open(settings: Settings, key: str, path: str | None, report: Reporter | None) -> TokenSource:
    data, vocabulary = settings.data, settings.model.vocabulary
    if data.tokenizer is not None and path is not None and is_text(path):
        return _tokenised(settings, key, path, report)
    try:
        if path is None:
            return raw_text.read(None)
        if (prefix := megatron.find(path)) is not None:
            return megatron.read(prefix)
        place = Path(path)
        if not place.exists():
            raise ValueError(f"{path} does not exist")
        if place.suffix == ".bin":
            return token_file.read(path, data.dtype, vocabulary)
        if place.suffix == ".parquet":
            raise ValueError(f"{path} needs a data.tokenizer: bytes, a tokenizer.json or a folder with one")
        return raw_text.read(path)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _tokenised(settings: Settings, key: str, path: str, report: Reporter | None) -> TokenSource:
    recipe = _recipe(settings.data, path, key)
    vocabulary, needed = settings.model.vocabulary, recipe.tokenizer.vocabulary
    if needed > vocabulary:
        raise ValueError(
            f"data.tokenizer={settings.data.tokenizer} has {needed} tokens; "
            f"model.vocabulary must be at least {needed}, it is {vocabulary}"
        )
    try:
        out = cached(recipe)
        tokenise(recipe, out, (lambda now: report(path, now)) if report else lambda now: None)
        return replace(token_file.read(str(out), "auto", vocabulary), name=path)
    except OSError as error:
        raise ValueError(f"{key}: {path} cannot be tokenised: {error}") from None
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _recipe(data: Data, path: str, key: str = "data.path") -> Recipe:
    assert data.tokenizer is not None
    tokenizer = load(data.tokenizer, data.separator)
    try:
        return Recipe(Corpus.of([path], data.column), tokenizer)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
