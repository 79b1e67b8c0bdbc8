"""All files and names in the documentation exist, and its training commands have valid settings.

A file may be given by the end of its path. A name must occur somewhere in the code.
"""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from recycle_pp.config.checks import validate
from recycle_pp.config.compose import compose

ROOT = Path(__file__).resolve().parent.parent
FILES = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
CODE = [
    (ROOT / name).read_text(errors="replace")
    for name in FILES
    if name.endswith((".py", ".yaml", ".toml", ".js", ".sh"))
]
WORDS = {word for text in CODE for word in re.findall(r"\w+", text)}
PATH = re.compile(r"[\w/.-]+\.(py|md|yaml|sh|csv)")
NAME = re.compile(r"[A-Za-z]\w*(?:_|\.|[a-z][A-Z])[\w.]*(\(\))?")  # excludes plain words


@pytest.mark.parametrize("document", [name for name in FILES if name.endswith(".md")])
def test_mentioned_files_and_names_exist(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    unknown = []
    for word in set(re.findall(r"`([^`\n]+)`", text)):
        if PATH.fullmatch(word):
            if "NAME" not in word and not any(file == word or file.endswith(f"/{word}") for file in FILES):
                unknown.append(word)
        elif NAME.fullmatch(word) and word.rstrip("()").split(".")[-1] not in WORDS:
            unknown.append(word)
    assert not unknown


def documented_trainings():
    """(document, command line) of every documented command that trains with settings on the command line."""
    for document in ("README.md", *(name for name in FILES if re.fullmatch(r"docs/[\w-]+\.md", name))):
        text = (ROOT / document).read_text().replace("\\\n", " ")
        blocks = re.findall(r"^```\n(.*?)^```|^( {4}.*)$", text, flags=re.DOTALL | re.MULTILINE)
        for line in "\n".join(map("\n".join, blocks)).splitlines():
            if re.search(r"recycle(_pp\.| )train .*=", line) and not re.search(r"\+join|\.yaml|model\.path=s3:", line):
                yield document, " ".join(line.split())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with the files and the model that the documents name."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("corpus.jsonl", "notes.jsonl", "chats.jsonl", "chats.bin", "train.bin"):
        (folder / name).write_bytes(bytes(100_000))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), 64)
    config = sizes | {"model_type": "llama", "vocab_size": 300, "num_hidden_layers": 32, "num_attention_heads": 4}
    (folder / "FOLDER").mkdir()
    (folder / "FOLDER" / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "FOLDER" / name).touch()
    return folder


@pytest.mark.parametrize(("document", "line"), [*documented_trainings()])
def test_every_documented_training_has_valid_settings(document, line, inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    launcher, _, arguments = line.partition("train ")
    given = [word for word in shlex.split(arguments, comments=True) if "=" in word and not word.startswith("[")]
    workers = [int(count) for count in re.findall(r"--(?:nnodes|nproc-per-node)=(\d+)", launcher)]
    validate(compose(given), math.prod(workers) if workers else None)
