"""Opens the token sources of a configuration, in any format.

    sources = training(settings); sources = validation(settings)      # [] without data.validation_path

The path selects the format:

- None: the source files of Python.
- PREFIX.idx with PREFIX.bin: Megatron's format.
- Any other .bin: bare tokens.
- s3://, gs:// or az://: the copy of `storage.local_copy`, in any of these formats, which must exist.
- hf://NAME:SPLIT: a dataset from the Hugging Face hub, fetched once (`hub`). It is text, like the folder of a saved
  dataset.
- Anything else is text. With data.tokenizer it is tokenised once, into a file in `cache_folder`. Without
  data.tokenizer the raw bytes are the tokens.

With data.format=chat the text contains conversations (`chat`), and a .bin is a file of packed conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from recycle_pp.config.settings import Data, Settings
from recycle_pp.storage.local_copy import cache_folder, is_stored, place

from . import megatron, raw_text, token_file
from .chat.recipe import ChatRecipe
from .documents import Corpus
from .hub import local
from .source import TokenSource
from .tokenization import Preparation, Recipe, Report, tokenise
from .tokenizer import load

Reporter = Callable[[str, Report], None]  # called with (path of the source, progress)


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
            recipe = _recipe(settings, path)
            size += 0 if cached(recipe).exists() else sum(recipe.corpus.sizes)
    return size


def separator(data: Data, found: Sequence[TokenSource]) -> int | None:
    """The token that follows every document of all sources; None without data.document_mask and for conversations.

    Conversations are separated by marks instead (`chat.packing`). A file made by `recycle_pp.tokenize` names its
    separator. For other files data.tokenizer determines it. Raises ValueError if it is unknown or differs between
    sources.
    """
    if not data.document_mask or data.format == "chat":
        return None
    said: dict[int, str] = {}
    for source in found:
        token = source.separator
        if token is None and data.tokenizer is not None and data.path is not None:
            token = load(data.tokenizer, data.separator).separator
        if token is None:
            raise ValueError(
                f"data.document_mask must be false: the token that separates documents of {source.name} is unknown; "
                "set data.tokenizer (to bytes, for text)"
            )
        said[token] = source.name
    if len(said) > 1:
        texts = [f"token {token} in {name}" for token, name in said.items()]
        raise ValueError(f"data.document_mask must be false: documents are separated by {' and by '.join(texts)}")
    return next(iter(said))


def needs_preparation(data: Data) -> bool:
    """Whether the data must be tokenised or checked before the workers start.

    Not needed for a single file or folder of bytes or bare tokens.
    """
    if data.masked or data.build is not None:
        return True
    if data.path is None:
        return data.validation_path is not None
    return (
        isinstance(data.path, list)
        or data.validation_path is not None
        or (data.tokenizer is not None and is_text(data.path))
        or megatron.find(str(place(data.path))) is not None
        or token_file.sidecar(place(data.path)).exists()
    )


def is_text(path: str) -> bool:
    return megatron.find(str(place(path))) is None and not path.endswith(".bin")


def cached(recipe: Preparation) -> Path:
    """Path of the file with the tokenised text, which may not exist yet."""
    return cache_folder("tokens") / f"{recipe.digest}.bin"


def _open(settings: Settings, key: str, path: str | None, report: Reporter | None) -> TokenSource:
    if settings.data.tokenizer is not None and path is not None and is_text(path):
        return _tokenised(settings, key, path, report)
    try:
        source = _read(settings, None if path is None else str(place(path)))
        return replace(source, name=path) if path is not None and is_stored(path) else source
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _read(settings: Settings, path: str | None) -> TokenSource:
    """The tokens of a file that needs no tokenizer. path: on this machine; None: the source files of Python."""
    data, vocabulary = settings.data, settings.model.vocabulary
    if path is None:
        return raw_text.read(None)
    if data.format == "chat":
        return token_file.read(path, "auto", vocabulary, settings.model.sequence)
    if (prefix := megatron.find(path)) is not None:
        return megatron.read(prefix)
    if not Path(path).exists():
        raise ValueError(f"{path} does not exist")
    if path.endswith(".bin"):
        return token_file.read(path, data.dtype, vocabulary)
    if path.endswith(".parquet"):
        raise ValueError(f"{path} needs a data.tokenizer: bytes, a tokenizer.json or a folder with one")
    return raw_text.read(path)


def _tokenised(settings: Settings, key: str, path: str, report: Reporter | None) -> TokenSource:
    recipe, vocabulary = _recipe(settings, path, key), settings.model.vocabulary
    out, sequence = cached(recipe), settings.model.sequence if settings.data.format == "chat" else None
    if not out.exists() and (needed := recipe.vocabulary) > vocabulary:
        raise ValueError(
            f"data.tokenizer={settings.data.tokenizer} has {needed} tokens; "
            f"model.vocabulary must be at least {needed}, but it is {vocabulary}"
        )
    try:
        tokenise(recipe, out, (lambda now: report(path, now)) if report else lambda now: None)
        return replace(token_file.read(str(out), "auto", vocabulary, sequence), name=path)
    except OSError as error:
        raise ValueError(f"{key}: {path} cannot be tokenised: {error}") from None
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _recipe(settings: Settings, path: str, key: str = "data.path") -> Preparation:
    data = settings.data
    assert data.tokenizer is not None
    tokenizer = None if data.format == "chat" else load(data.tokenizer, data.separator)
    try:
        corpus = Corpus.of([local(path)], data.column)
        if tokenizer is None:
            return ChatRecipe(corpus, data.tokenizer, settings.model.sequence)
        return Recipe(corpus, tokenizer)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
