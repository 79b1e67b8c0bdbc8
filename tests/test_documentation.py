"""All files and names in the documentation exist: files by their path or the end of it, names anywhere in the code."""

import re
import subprocess
from pathlib import Path

import pytest

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
