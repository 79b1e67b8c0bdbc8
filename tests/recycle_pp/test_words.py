"""Messages to users avoid certain phrases. A message is any string literal of the product's sources."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = {
    r", as asked": "an injected failure",
    r"\btold to go\b": "got SIGTERM",
    r"\bis none\b": "not X",
    r"\bsaid once\b": "nothing",
    r"\bgoes on without$|\bgoes on without\"": "without it",
    r"\bdone again\b": "redone",
    r"\bsays why\b": "see X",
    r"\bdoes not say\b": "has no",
}
FOLDERS = ("recycle_pp", "schedules/recycle_schedules", "kernels/recycle_kernels")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "testing" not in path.parts)


def sentences(path):
    """(line, text) of every literal that is not a docstring."""
    tree = ast.parse(path.read_text())
    documenting = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documenting)]
    documented = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.lineno, node.value


@cache
def every_sentence():
    return [(path, line, text) for path in SOURCES for line, text in sentences(path) if " " in text]


@pytest.mark.parametrize("old", OLD)
def test_no_sentence_has_an_old_phrase(old):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}" for path, line, text in every_sentence() if re.search(old, text)
    ]
    assert not found, f"write {OLD[old]!r} instead: {found}"


def test_the_search_finds_literals_and_skips_docstrings(tmp_path):
    source = tmp_path / "x.py"
    source.write_text('"""It is none."""\nraise ValueError(f"{x!r} is none")\n')
    assert [(line, text) for line, text in sentences(source) if "none" in text] == [(2, " is none")]
