"""Who takes over micro-batches that have lost their worker, where some peers are nearer than others.

    taken = cheapest_flow(count, message, load, cost)     # how many of each group each peer takes

A minimum-cost flow (networkx's network simplex) from groups of micro-batches to peers: taking the k-th further
micro-batch costs a peer the time at which it is done with it, `load + k * cost`, and the micro-batch its messages to
and from there. So peers are filled evenly, and nearer ones first, by as much as the way to the others takes.
"""

from __future__ import annotations

import heapq

import networkx as nx
import numpy as np


def cheapest_flow(count: np.ndarray, message: np.ndarray, load: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """(groups, peers) int64: how many micro-batches of each group each peer takes; the rows sum to `count`.

    count (groups,)            how many micro-batches a group has
    message (groups, peers)    time of all messages of one of them if it runs there, whole ticks as all times here
    load (peers,)              when a peer is done with what it has already
    cost (peers,)              how long a micro-batch keeps it busy
    Peers that differ in nothing share evenly; earlier ones take what cannot be shared."""
    groups, peers = message.shape
    alike: dict[tuple[int, ...], list[int]] = {}
    for p in range(peers):
        alike.setdefault((load[p], cost[p], *message[:, p]), []).append(p)
    graph = nx.MultiDiGraph()
    graph.add_node("done", demand=int(count.sum()))
    for g in range(groups):
        graph.add_node(("group", g), demand=-int(count[g]))
    last = _even_end(load, cost, int(count.sum())) + int(message.max())  # nobody is done later than this
    for kind, ((begin, step, *ways), members) in enumerate(alike.items()):
        most = int(count.sum()) if step == 0 else max(0, int(last - min(ways) - begin) // int(step))
        for k in range(1, min(most, int(count.sum())) + 1):
            graph.add_edge(("peers", kind), "done", key=k, capacity=len(members), weight=int(begin + k * step))
        for g in range(groups):
            graph.add_edge(("group", g), ("peers", kind), weight=int(ways[g]))
    _, flow = nx.network_simplex(graph)
    taken = np.zeros((groups, peers), dtype=np.int64)
    for kind, members in enumerate(alike.values()):
        turn = 0
        for g in range(groups):
            for _ in range(sum(flow["group", g][("peers", kind)].values())):
                taken[g, members[turn % len(members)]] += 1
                turn += 1
    return taken


def even_shares(load: list[int], cost: list[int], n: int, turn: int) -> list[int]:
    """How many of n micro-batches each worker takes, so that the last one is done as early as possible.

    turn: rotates who is asked first among equals."""
    k = len(load)
    heap = [(load[i] + cost[i], (i - turn) % k, i) for i in range(k)]
    heapq.heapify(heap)
    share = [0] * k
    for _ in range(n):
        end, tie, i = heap[0]
        share[i] += 1
        heapq.heapreplace(heap, (end + cost[i], tie, i))
    return share


def _even_end(load: np.ndarray, cost: np.ndarray, n: int) -> int:
    """When the last of n micro-batches is done in even shares."""
    share = np.array(even_shares(load.tolist(), cost.tolist(), n, 0))
    return int((load + share * cost)[share > 0].max(initial=0))
