"""Lists the rounds and the islands in a store, from anywhere.

    python -m recycle_pp.islands STORE               # two tables
    python -m recycle_pp.islands STORE --json        # {"rounds": [...], "islands": [...]}

Each island that has applied a round stores a checksum of the resulting theta, for the layers that the round has
synchronised. The checksums of a round must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from recycle_pp.storage.store import Absent, Store, StoreError

from .objects import RUN, View, closed_path, covers, lease_path, of_round
from .rounds import alive, closing_of

PATIENCE = 20.0  # seconds for which failing requests are retried
NEWEST = 20  # number of rounds that are listed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recycle_pp.islands", description="Lists rounds and islands.")
    parser.add_argument("store", help="islands.store: s3://, gs:// or az:// URL, or a folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=NEWEST, metavar="N", help=f"number of newest rounds ({NEWEST})")
    arguments = parser.parse_args(argv)
    try:
        found = state(Store(arguments.store, PATIENCE), arguments.rounds)
        if not (found["rounds"] or found["islands"]):
            raise StoreError(f"{arguments.store} contains no islands")
    except StoreError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def state(store: Store, newest: int = NEWEST) -> dict[str, Any]:
    """The newest rounds and all islands. Raises StoreError."""
    view = View.of(store.objects(), _fragments(store))
    rounds = []
    for number in sorted(view.closed)[-newest:] if newest > 0 else []:
        closing = closing_of(store.get(closed_path(number)))
        rounds.append(
            {
                "round": number,
                "islands": sorted(closing),
                "samples": {name: share.samples for name, share in closing.items()},
                "theta_sha256": _sums(store, view, number),
            }
        )
    islands, live = [], alive(view.leases)
    for name, renewed in sorted(view.leases.items()):
        try:
            about = json.loads(store.get(lease_path(name)))
        except (json.JSONDecodeError, UnicodeDecodeError):
            about = {}
        islands.append(
            {
                "name": name,
                "live": name in live,
                "seconds": round(max(view.leases.values()) - renewed, 1),
                "step": about.get("step"),
                "round": about.get("round"),
            }
        )
    return {"rounds": rounds, "islands": islands}


def _fragments(store: Store) -> int:
    """islands.fragments, as the first island has written it."""
    try:
        return int(json.loads(store.get(RUN))["settings"].get("islands.fragments", 1))
    except Absent:
        return 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{store.url}/{RUN} is damaged: {error}") from None


def _sums(store: Store, view: View, number: int) -> dict[str, str]:
    """Island -> SHA-256 of the SHA-256 of all units of theta that the round has synchronised, in order of layers and
    units."""
    found = {}
    for name, parts in view.sums.get(number, {}).items():
        if not covers(parts, of_round(view.layout, number, view.fragments)):
            continue
        units: dict[tuple[int, int], str] = {}
        for part in parts:
            units |= zip(((part.layer, unit) for unit in part.units()), json.loads(store.get(part.path)), strict=False)
        found[name] = hashlib.sha256("".join(units[key] for key in sorted(units)).encode()).hexdigest()
    return found


def _print(found: dict[str, Any]) -> None:
    console = Console()
    rounds = Table("round", "islands", "samples", "theta", title="rounds")
    for each in found["rounds"]:
        sums = each["theta_sha256"]
        same = "" if not sums else "equal" if len({*sums.values()}) == 1 else "DIFFERENT"
        on = f"{same} on {', '.join(sorted(sums))}" if sums else ""
        samples = sum(each["samples"].values())
        rounds.add_row(str(each["round"]), ", ".join(each["islands"]), f"{samples:,}", on)
    islands = Table("island", "step", "round", "last seen", title="islands")
    for each in found["islands"]:
        seen = "now" if each["live"] else f"{each['seconds']:.0f} s before the newest"
        islands.add_row(each["name"], str(each["step"]), str(each["round"]), seen)
    console.print(rounds, islands)


if __name__ == "__main__":
    sys.exit(main())
