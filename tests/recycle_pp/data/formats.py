"""Makes test files of every format."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
WORDS = "def return class import self for in range brown fox jumps über the lazy dog 1234".split()  # noqa: SIM905


def text(length: int, seed: int = 0) -> str:
    """A random text of `length` words with line breaks, indentation and empty lines."""
    random = np.random.default_rng(seed)
    parts = []
    for word in random.choice(WORDS, length):
        parts += [str(word), str(random.choice([" ", " ", " ", "\n", "\n\n", "\n    ", "  "]))]
    return "".join(parts)


def tokenizer(folder: Path, vocabulary: int = 320) -> Path:
    """Writes a byte-level BPE like GPT-2's to folder/tokenizer.json. Returns the folder."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text(500)], trainer)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def jsonl(path: Path, texts: Sequence[str], column: str = "text") -> str:
    path.write_text("".join(json.dumps({"id": i, column: one}) + "\n" for i, one in enumerate(texts)))
    return str(path)


def parquet(path: Path, texts: Sequence[str | None], column: str = "text", rows: int = 7) -> str:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": list(range(len(texts))), column: pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)
    return str(path)


def megatron(prefix: Path, documents: Sequence[Sequence[int]], code: int = 8, dtype: str = "<u2") -> str:
    """Writes PREFIX.bin and PREFIX.idx in the format of Megatron-LM's IndexedDatasetBuilder.

    Its output was once compared with that of the builder."""
    arrays = [np.asarray(document, dtype) for document in documents]
    lengths = np.array([len(array) for array in arrays], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths.astype("<i8"))[:-1]]) * np.dtype(dtype).itemsize
    Path(f"{prefix}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(arrays), len(arrays) + 1)
        + lengths.tobytes() + pointers.astype("<i8").tobytes() + np.arange(len(arrays) + 1, dtype="<i8").tobytes()
    )  # fmt: skip
    return str(prefix)
