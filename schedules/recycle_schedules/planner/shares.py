"""Distributes micro-batches that leave their own worker over its peers, taking message times into account.

    taken = cheapest_flow(count, message, load, cost)     # how many of each group each peer takes

A minimum-cost flow (networkx's network simplex) from groups of micro-batches to peers. The k-th additional micro-batch
of a peer costs its end time, `load + k * cost`, plus the time of its messages to and from the peer. So the peers' loads
become even, except that a nearer peer takes more work, up to the difference in message times.
"""

from __future__ import annotations

import heapq

import networkx as nx
import numpy as np


def cheapest_flow(count: np.ndarray, message: np.ndarray, load: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """(groups, peers) int64: how many micro-batches of each group each peer takes. Rows sum to `count`.

    count (groups,)            micro-batches in the group
    message (groups, peers)    time of all messages of one micro-batch if the peer runs it, ticks
    load (peers,)              end of the peer's existing work, ticks
    cost (peers,)              work of one micro-batch on the peer, ticks

    Identical peers share evenly; the first ones take the remainder."""
    groups, peers = message.shape
    alike: dict[tuple[int, ...], list[int]] = {}
    for p in range(peers):
        alike.setdefault((load[p], cost[p], *message[:, p]), []).append(p)
    graph = nx.MultiDiGraph()
    graph.add_node("done", demand=int(count.sum()))
    for g in range(groups):
        graph.add_node(("group", g), demand=-int(count[g]))
    last = _even_end(load, cost, int(count.sum())) + int(message.max())  # an end time that no peer exceeds
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
    """The number of micro-batches for each worker, n in total, such that the last of them ends as early as possible.

    turn: rotates the order of equal workers."""
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
    """End time of the last of n micro-batches with even shares."""
    share = np.array(even_shares(load.tolist(), cost.tolist(), n, 0))
    return int((load + share * cost)[share > 0].max(initial=0))
