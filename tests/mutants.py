"""Mutations: lists the small mistakes that can be introduced into source code, and introduces one of them.

    for mutation, place in mutations(root, "recycle_pp/protocol").items():
        text = place.replace(text, mutation.new)

A mutation negates a comparison, drops a statement or swaps two neighbouring arguments of a call. Only code inside
functions is changed, because every test would find a mistake in code that runs at import.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

COMPARISON, STATEMENT, ARGUMENTS = KINDS = ("comparison negated", "statement dropped", "arguments swapped")
NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "==",
           "in": "not in", "not in": "in", "is": "is not", "is not": "is"}  # fmt: skip
OPERATORS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
SYMMETRIC = {"min", "max"}  # calls whose result does not depend on the order of their arguments
PASS = "pass"


@dataclass(frozen=True, order=True)
class Mutation:
    """Replaces `old` with `new`. Equal mutations in different revisions of a file are the same mistake."""

    path: str  # relative to the root of the repository
    function: str  # qualified name
    kind: str
    old: str
    new: str
    nth: int  # index among equal mutations of this function, from 0

    def __str__(self) -> str:
        old, new = (re.sub(r"\s+", " ", text) for text in (self.old, self.new))
        return f"{old} -> {new}" if self.kind != STATEMENT else f"drop {old}"


@dataclass(frozen=True)
class Place:
    """The position of a mutation's old text in its file."""

    line: int
    start: int  # index of the first character
    stop: int

    def replace(self, text: str, by: str) -> str:
        return text[: self.start] + by + text[self.stop :]


def mutations(root: Path, *packages: str) -> dict[Mutation, Place]:
    """All mutations of all functions in these folders of `root`."""
    found: dict[Mutation, Place] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            found |= of_text(path.read_text(), str(path.relative_to(root)))
    return found


def of_text(text: str, path: str) -> dict[Mutation, Place]:
    lines = [f"{line}\n" for line in text.split("\n")]
    starts = [0, *accumulate(map(len, lines))]

    def place(node: ast.stmt | ast.expr) -> Place:
        """The place of a node. ast counts columns in bytes of UTF-8."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, stop = (
            starts[line - 1] + len(lines[line - 1].encode()[:column].decode())
            for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        return Place(node.lineno, start, stop)

    def source(node: ast.stmt | ast.expr) -> str:
        where = place(node)
        return text[where.start : where.stop]

    seen: Counter[tuple[str, ...]] = Counter()
    found = {}
    for function, node in _in_functions(ast.parse(text)):
        for kind, new in _changes(node, source):
            key = (path, function, kind, source(node), new)
            found[Mutation(*key, nth=seen[key])] = place(node)
            seen[key] += 1
    return found


def _in_functions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """Yields (qualified name of the function, statement or expression in it), in file order."""

    def visit(node: ast.AST, names: tuple[str, ...], inside: bool) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
        if isinstance(node, ast.JoinedStr | ast.Assert):
            return  # Python 3.11 has no columns inside f-strings; assertions do not affect correct code
        if inside and isinstance(node, ast.stmt | ast.expr):
            yield ".".join(names), node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from visit(statement, (*names, node.name), True)
        elif isinstance(node, ast.ClassDef):
            for statement in node.body:
                yield from visit(statement, (*names, node.name), inside)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, names, inside)

    return visit(tree, (), False)


def _changes(node: ast.stmt | ast.expr, source) -> Iterator[tuple[str, str]]:
    """(kind, new text)"""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = OPERATORS[type(node.ops[0])]
        yield COMPARISON, f"({source(node.left)}) {NEGATED[operator]} ({source(node.comparators[0])})"
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in SYMMETRIC:
            return
        for one, other in zip(node.args, node.args[1:], strict=False):
            texts = source(one), source(other)
            if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred) and texts[0] != texts[1]:
                words = [source(argument) for argument in node.args]
                number = node.args.index(one)
                words[number], words[number + 1] = texts[1], texts[0]
                words += [f"{key.arg}={source(key.value)}" if key.arg else f"**{source(key.value)}"
                          for key in node.keywords]  # fmt: skip
                yield ARGUMENTS, f"{source(node.func)}({', '.join(words)})"
    elif _may_be_dropped(node):
        yield STATEMENT, PASS


def _may_be_dropped(node: ast.stmt | ast.expr) -> bool:
    """Whether a statement may be dropped. Not an assignment to a local name, because its next use would always fail."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break)
