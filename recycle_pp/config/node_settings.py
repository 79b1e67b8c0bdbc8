"""The settings that one node of a job was started with, for a comparison with other nodes.

    node = NodeSettings.of(settings, arguments)
    node.shared                                      # {"run.steps": "60", ...}: sent to the coordinator
    first_difference(node.shared, other.shared)      # ("run.steps", "60", "100"); None if they agree

Every node composes its own settings, but all workers run with the settings of rank 0. If a node's settings differ, its
command line is wrong. Only two keys may differ: `control.address`, because a host may have several addresses, and
`control.interface`, because interface names differ between machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from .loading import flat
from .run_file import read_run_file, split
from .setting import rules, shown
from .settings import Settings

OF_A_NODE = frozenset(key for key, rule in rules(Settings).items() if rule.per_node)
_DATED = "its default, named after the time"
_ABSENT = "no such key (a different version of recycle_pp)"


@dataclass(frozen=True)
class NodeSettings:
    """The settings that a node was started with.

    shared     key -> value in a user's notation, for every key that must have the same value on all nodes
    interface  control.interface of this node
    """

    shared: Mapping[str, str]
    interface: str | None

    @classmethod
    def of(cls, settings: Settings, arguments: Sequence[str]) -> NodeSettings:
        """The settings of this node.

        settings   the settings composed from `arguments`, before a resume or the start changes them
        arguments  the command line. Nodes compare the run.dir that is written there or in the settings file, because
                   the default of run.dir contains the time
        """
        shared = {key: shown(value) for key, value in flat(asdict(settings)).items() if key not in OF_A_NODE}
        words, path = split(arguments)
        given = [text.partition("=")[2] for text in words if text.lstrip("+").startswith("run.dir=")]
        if not given and path is not None and "run.dir" in (file := read_run_file(path, resolve=False)):
            given = [file["run.dir"]]
        shared["run.dir"] = given[-1] if given else _DATED
        return cls(shared, settings.control.interface)


def first_difference(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first key whose values differ between two nodes: (key, value in `a`, value in `b`). None if all are equal."""
    for key in {**a, **b}:
        one, other = a.get(key, _ABSENT), b.get(key, _ABSENT)
        if one != other:
            return key, one, other
    return None
