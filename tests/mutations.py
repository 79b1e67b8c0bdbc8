"""Measures the tests: introduces random small mistakes into the product, one at a time, and prints which are found.

    .venv/bin/python tests/mutations.py --seed 1 --count 20                             # the tests of HEAD
    .venv/bin/python tests/mutations.py --seed 1 --count 20 --revisions 241cd12 HEAD    # and those of an older revision

Each revision is checked out in --folder. The mistakes are drawn from code that all revisions share (see `mutants.py`).
First the whole suite runs once, with a probe at the place of each mistake. This shows which tests reach each place.
Tests that fail in this run are excluded. Then, for each mistake, the tests that reach it run, fastest first, until one
fails. A failure that does not repeat does not count.

Results are kept in --folder, so the same command continues after an interruption. The command takes as long as the
suite, and up to that time again for each mistake that no test finds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path

from mutants import KINDS, STATEMENT, Mutation, Place, mutations

ROOT = Path(__file__).parents[1]
PACKAGES = [f"recycle_pp/{room}" for room in ("protocol", "coordinator", "fitting", "state", "numerics", "execution")]
PROBE = '__import__("mutation_probe").reached({number})'
SUITE_SECONDS = 3 * 3600.0
PASSED, FAILED, NONE = 0, 1, 5  # exit codes of pytest; any other code means that the tests could not be collected


@dataclass(frozen=True)
class Verdict:
    """Whether the tests of one revision find one mistake."""

    killed: bool
    tests: int  # number of tests that reach it
    by: str  # the test that finds it
    seconds: float

    def __str__(self) -> str:
        if self.killed:
            return f"killed by {self.by}"
        return f"survived {self.tests} tests" if self.tests else "survived: no test reaches it"


class Tree:
    """A checked-out revision. Its product can be changed, and its tests run against the changed product."""

    def __init__(self, revision: str, folder: Path, options: list[str]) -> None:
        commit = subprocess.check_output(["git", "rev-parse", "--short", f"{revision}^0"], cwd=ROOT, text=True).strip()
        self.revision, self._options = revision, options
        self.path, self.notes = folder / commit, folder / f"{commit}-notes"
        if not self.path.exists():
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", self.path, commit], cwd=ROOT, check=True)
        self.notes.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("mutation_probe.py"), self.notes)
        sources = [self.notes, self.path, self.path / "schedules", self.path / "kernels"]
        self._environment = {
            **os.environ,
            "CI": "1",  # makes hypothesis draw the same examples every time
            "OMP_NUM_THREADS": "1",
            "MUTATIONS": str(self.notes),
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
        }
        self._stamp = time.time()
        subprocess.run(["git", "checkout", "--quiet", "."], cwd=self.path, check=True)
        subprocess.run([sys.executable, "-m", "recycle_schedules.compiled"], env=self._environment, check=True)

    def write(self, path: str, text: str) -> None:
        """Writes a file with a new modification time, so that Python compiles it again."""
        (self.path / path).write_text(text)
        self._stamp = max(self._stamp + 2.0, time.time())
        os.utime(self.path / path, (self._stamp, self._stamp))

    def pytest(self, tests: dict[str, float] | None, *words: str) -> int:
        """Runs pytest with empty `reports` and `reached`, and returns its exit code.

        tests: {test: time limit in seconds}; None: all tests
        """
        for name in ("reports", "reached", "selected.json"):
            (self.notes / name).unlink(missing_ok=True)
        files: list[str] = []
        if tests is not None:
            (self.notes / "selected.json").write_text(json.dumps(tests))
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        common = ["-q", "--tb=short", "-p", "mutation_probe", "-p", "no:cacheprovider", *self._options]
        with (self.notes / "output").open("w") as output, subprocess.Popen(
            [sys.executable, "-m", "pytest", *common, *words, *files],
            cwd=self.path, env=self._environment, stdout=output, stderr=output, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return process.wait(SUITE_SECONDS)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    return FAILED
                raise

    def reports(self) -> list[dict]:
        path = self.notes / "reports"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument(
        "--revisions",
        nargs="+",
        default=["HEAD"],
        help="the exit code is 1 if the last of these finds fewer mistakes than another one",
    )
    parser.add_argument("--options", nargs="*", default=[], help="pytest options, such as --full or a folder of tests")
    parser.add_argument("--folder", type=Path, default=ROOT / ".mutations")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    trees = [Tree(revision, folder, arguments.options) for revision in arguments.revisions]
    places = [mutations(tree.path, *PACKAGES) for tree in trees]
    drawn = draw(places, arguments.seed, arguments.count)
    name = f"{arguments.seed}-{arguments.count}-{'+'.join(arguments.revisions)}"
    found = {tree.revision: judge(tree, drawn, where, name) for tree, where in zip(trees, places, strict=True)}
    print(table(drawn, places[-1], found))
    judged, *others = reversed([sum(v.killed for v in verdicts) for verdicts in found.values()])
    return int(any(judged < other for other in others))


def draw(places: list[dict[Mutation, Place]], seed: int, count: int) -> list[Mutation]:
    """Draws the same number of mutations of each kind, without overlaps."""
    chance = random.Random(seed)
    shared = sorted(set.intersection(*map(set, places)))
    of_kind = {kind: [mutation for mutation in shared if mutation.kind == kind] for kind in KINDS}
    drawn: list[Mutation] = []
    while len(drawn) < count:
        left = of_kind[KINDS[len(drawn) % len(KINDS)]]
        mutation = left.pop(chance.randrange(len(left)))
        if not any(_overlap(mutation, other, where) for other in drawn for where in places):
            drawn.append(mutation)
    return drawn


def _overlap(one: Mutation, other: Mutation, where: dict[Mutation, Place]) -> bool:
    a, b = where[one], where[other]
    return one.path == other.path and a.start < b.stop and b.start < a.stop


def judge(tree: Tree, drawn: list[Mutation], where: dict[Mutation, Place], name: str) -> list[Verdict]:
    kept = tree.notes / f"{name}.json"
    state = json.loads(kept.read_text()) if kept.exists() else {}
    if "tests" not in state:
        state = {"tests": reach(tree, drawn, where), "verdicts": []}
        kept.write_text(json.dumps(state))
    for number in range(len(state["verdicts"]), len(drawn)):
        verdict = run(tree, drawn[number], where[drawn[number]], state["tests"][number])
        state["verdicts"].append(astuple(verdict))
        kept.write_text(json.dumps(state))
        print(f"{tree.revision}, {number + 1} of {len(drawn)}, {verdict.seconds:.0f} s: {verdict}", flush=True)
    return [Verdict(*verdict) for verdict in state["verdicts"]]


def reach(tree: Tree, drawn: list[Mutation], where: dict[Mutation, Place]) -> list[dict[str, float]]:
    """For each mutation, the tests that reach it and pass without it: test -> time limit in seconds."""
    texts = {mutation.path: (tree.path / mutation.path).read_text() for mutation in drawn}
    probed = dict(texts)
    for number in sorted(range(len(drawn)), key=lambda number: -where[drawn[number]].start):
        mutation = drawn[number]
        probed[mutation.path] = where[mutation].replace(probed[mutation.path], probe(mutation, number))
    try:
        for path, text in probed.items():
            tree.write(path, text)
        code = tree.pytest(None)
    finally:
        for path, text in texts.items():
            tree.write(path, text)
    if code not in (PASSED, FAILED):
        raise RuntimeError(f"pytest ended with code {code}; see {tree.notes / 'output'}")
    seconds: defaultdict[str, float] = defaultdict(float)
    failed = set()
    for report in tree.reports():
        seconds[report["test"]] += report["seconds"]
        if report["outcome"] != "passed":
            failed.add(report["test"])
    print(f"{tree.revision}: {len(seconds)} tests, of which {len(failed)} did not pass and do not count", flush=True)
    reached = tree.notes / "reached"
    lines = [line.split("\t") for line in reached.read_text().splitlines()] if reached.exists() else []
    found: list[dict[str, float]] = []
    for number in range(len(drawn)):
        tests: set[str] = set()
        for which, phase, test in lines:
            if int(which) == number:
                # Code reached by a fixture may be checked by any test of the file.
                file = test.partition("::")[0] + "::"
                tests |= {test} if phase == "call" else {other for other in seconds if other.startswith(file)}
        quick_first = sorted((tests & seconds.keys()) - failed, key=lambda test: (seconds[test], test))
        found.append({test: 60.0 + 5.0 * seconds[test] for test in quick_first})
    return found


def probe(mutation: Mutation, number: int) -> str:
    """The old text, preceded by a probe that records that it is reached."""
    note = PROBE.format(number=number)
    return f"{note}; {mutation.old}" if mutation.kind == STATEMENT else f"({note} and ({mutation.old}))"


def run(tree: Tree, mutation: Mutation, place: Place, tests: dict[str, float]) -> Verdict:
    """Runs the tests with the mutation in place."""
    begun, number = time.monotonic(), len(tests)
    if not tests:
        return Verdict(False, 0, "", 0.0)
    text = (tree.path / mutation.path).read_text()
    tree.write(mutation.path, place.replace(text, mutation.new))
    try:
        while tests:
            code = tree.pytest(tests, "-x", "-n2", "--dist=load", "--maxschedchunk=1")
            reports = tree.reports()
            by = next((report["test"] for report in reports if report["outcome"] == "failed"), None)
            if by is None and code in (PASSED, NONE):
                break
            if by is None:
                return Verdict(True, number, f"pytest, which ends with code {code}", time.monotonic() - begun)
            if tree.pytest({by: tests[by]}, "-n0") != PASSED:
                return Verdict(True, number, by, time.monotonic() - begun)
            passed = {report["test"] for report in reports if report["phase"] == "call"}
            tests = {test: seconds for test, seconds in tests.items() if test not in passed | {by}}
        return Verdict(False, number, "", time.monotonic() - begun)
    finally:
        tree.write(mutation.path, text)


def table(drawn: list[Mutation], where: dict[Mutation, Place], found: dict[str, list[Verdict]]) -> str:
    lines = []
    for number, mutation in enumerate(drawn):
        title = f"{number + 1:>3} {mutation.path}:{where[mutation].line} {mutation.kind}: {mutation}"
        lines.append(textwrap.shorten(title, 160))
        lines += [f"      {revision}: {verdicts[number]}" for revision, verdicts in found.items()]
    for revision, verdicts in found.items():
        lines.append(f"{revision}: killed {sum(v.killed for v in verdicts)} of {len(drawn)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
