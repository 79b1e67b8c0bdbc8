"""The text that `recycle_pp.train --help` prints, and the table of all settings in docs/configuration.md.

print(help_text())
print(table())      # Markdown; python -m recycle_pp.config.help prints the table too
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from .compose import options
from .faults import MOMENTS
from .setting import Change, Rule, rules, shown
from .settings import FAULTS, Settings

_HELP = """\
recycle_pp: data x pipeline parallel training that continues when workers die.

usage: torchrun --nproc-per-node=WORKERS -m recycle_pp.train [FILE.yaml] [GROUP=NAME | GROUP.KEY=VALUE | +FAULT=... ]...
       WORKERS = parallel.pipelines * parallel.stages; a single worker (parallel=1x1) needs no torchrun
   or: recycle train [FILE.yaml] [GROUP=NAME | GROUP.KEY=VALUE | +FAULT=... ]...
       (one machine; runs torchrun for you)

examples:
  torchrun --nproc-per-node=12 -m recycle_pp.train +fail_at=20:1.2 +rejoin_at=40:1.2
  torchrun --nproc-per-node=4 -m recycle_pp.train parallel=2x2 model=tiny '+fail_at=[5:0.1@backward,9:1.0@allreduce]'
  torchrun --nproc-per-node=12 -m recycle_pp.train emulate=sleep run.dir=runs/rehearsal
  torchrun --nproc-per-node=4 -m recycle_pp.train parallel=2x2 run.dir=runs/mine run.resume=true
  python -m recycle_pp.train parallel=1x1 model=tiny data.path=book.txt

faults (steps count from 0; one fault, or a list in brackets):
{faults}
  moments: {moments}

nodes: torchrun --nproc-per-node=WORKERS -m recycle_pp.train +join=HOST:PORT (or +join=RUN_DIR) replaces a lost
       node of a running job

files: FILE.yaml sets any of the keys below. `recycle init` writes such a file; a run's config.yaml is one too
       --config-dir DIR adds files of a group, DIR/GROUP/NAME.yaml
"""


def help_text() -> str:
    """The help: usage, examples, and every key with its default, its meaning and its allowed values."""
    known = rules(Settings)
    faults = "\n".join(f"  {f'+{name}={known[name].form}':<30} {known[name].text}" for name in FAULTS)
    moments = ("\n" + " " * 11).join(" ".join(MOMENTS[k : k + 6]) for k in range(0, len(MOMENTS), 6))
    lines = [_HELP.format(faults=faults, moments=moments), "keys:"]
    for group in _groups():
        names = ["DxP"] if group == "parallel" else options(group)
        lines.append(f"  {group}={'|'.join(names)}")
        for key, rule in known.items():
            if key.startswith(f"{group}."):
                lines.append(f"    {f'{key}={shown(rule.default)}':<44} {rule.text}{_allowed(rule)}")
    return "\n".join(lines)


def table() -> str:
    """The Markdown table of all settings, without the faults."""
    rows = ["| key | default | allowed | resume | meaning |", "|---|---|---|---|---|"]
    for key, rule in rules(Settings).items():
        if key not in FAULTS:
            may = _RESUME[rule.change] + ", `ctl`" * rule.live
            cells = (f"`{key}`", f"`{shown(rule.default)}`", rule.allowed, may, rule.text)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


_RESUME = {Change.NEVER: "must stay", Change.RESUME: "may change", Change.START: "not kept"}


def _allowed(rule: Rule) -> str:
    return f" ({rule.allowed})" if rule.allowed else ""


def _groups() -> list[str]:
    return [group.name for group in fields(Settings) if is_dataclass(getattr(Settings(), group.name))]


if __name__ == "__main__":
    print(table())
