"""One check, and what all of them mean together.

text(checks)        # the screen: the worst first, each with its advice
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
    """
    value   what was found: "64 MB free"
    limit   what is needed: "256 MB"
    advice  what to do, mostly a command; "" if all is well
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
    lines = [f"{VERDICTS[code(checks)]}: {wrong or 'none'} of {plural(len(checks), 'check')} found a problem"]
    names, values = (max(len(check[column]) for check in checks) for column in (0, 1))
    for check in sorted(checks, key=lambda check: -VERDICTS.index(check.verdict)):
        lines.append(f"  {check.verdict:7}  {check.name:{names}}  {check.value:{values}}  {check.limit}".rstrip())
        if check.advice:
            lines.append(f"           {check.advice}")
    return "\n".join(lines)
