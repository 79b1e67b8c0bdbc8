"""The result of a check, and the verdict of all checks together.

text(checks)        # for the screen: the worst check first, each with its advice
as_json(checks)     # {"verdict": "warning", "checks": [{"name": "shared memory", ...}, ...]}
code(checks)        # exit code: 0 well, 1 a warning, 2 do not train here
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from recycle_pp.telemetry.words import plural

Verdict = Literal["well", "warning", "broken"]
VERDICTS: tuple[Verdict, ...] = ("well", "warning", "broken")  # their indices are the exit codes


class Check(NamedTuple):
    """The result of a check.

    name     what was checked: "shared memory"
    value    what was found: "64 MB free"
    limit    what is needed: "256 MB"
    verdict  well, warning, or broken: do not train on this machine
    advice   what to do, usually a command; "" if all is well
    """

    name: str
    value: str
    limit: str
    verdict: Verdict = "well"
    advice: str = ""


def code(checks: Sequence[Check]) -> int:
    return max((VERDICTS.index(check.verdict) for check in checks), default=0)


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    return {"verdict": VERDICTS[code(checks)], "checks": [check._asdict() for check in checks]}


def text(checks: Sequence[Check]) -> str:
    wrong = sum(check.verdict != "well" for check in checks)
    head = f"{VERDICTS[code(checks)]}: {wrong or 'none'} of {plural(len(checks), 'check')} found a problem"
    return "\n".join([head, *lines(checks)])


def lines(checks: Sequence[Check]) -> list[str]:
    """Lines for the screen, the worst check first, each with its advice."""
    if not checks:
        return []
    found = []
    names, values = (max(len(check[column]) for check in checks) for column in (0, 1))
    for check in sorted(checks, key=lambda check: -VERDICTS.index(check.verdict)):
        found.append(f"  {check.verdict:7}  {check.name:{names}}  {check.value:{values}}  {check.limit}".rstrip())
        if check.advice:
            found.append(f"           {check.advice}")
    return found


def size(count: float) -> str:
    """A number of bytes in words: "64 MB", "1.1 GB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e6:.0f} MB"
