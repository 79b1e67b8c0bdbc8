"""Messages and sums among the members of a generation, by worker instead of by rank.

    links = Links(transport)                        # execution.transports has them
    links.rebuild(generation, members, me)          # in a thread that can be abandoned
    links.connect({Worker(0, 1), Worker(1, 2)})     # with whom messages will be exchanged
    work = links.receive(buffer, frm=Worker(0, 1), tag=17)
    links.send(tensor, to=Worker(1, 2), tag=18)
    links.all_reduce([gradient, losses]).wait()     # in place, over the live workers of my stage
    links.abort()                                   # from any thread: all of the above raise LinkBroken

The executor asks for nothing else. It may keep many receives and sends outstanding, in any order, with unique tags.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from recycle_schedules import Worker
from torch import Tensor

from .transport import Transport
from .waiting import Generation, LinkBroken, Pending


class Links:
    """Messages and sums among the members of the present generation, carried by `transport`.

    Every method may be called from any thread; none holds a lock while it blocks.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._lock = threading.Lock()
        self._wanted = -1  # newest generation that anybody asked for
        self._present: Generation | None = None
        self._building: Generation | None = None
        self._followed: int | None = None  # the only generation whose operations are allowed

    @property
    def generation(self) -> int:
        """-1 before the first rebuild and after an abort."""
        present = self._present
        return -1 if present is None else present.number

    @property
    def ordered(self) -> bool:
        """Whether a stage's workers exchange by sums and broadcasts alone, all of them in one order (groups of Gloo or
        NCCL); else each pair of them has messages as well."""
        return self._transport.ordered

    def rebuild(self, generation: int, members: Sequence[Worker], me: Worker, base: int | None = None) -> None:
        """Makes `generation` the present one. Every member calls it with the same arguments but `me`.

        base: the newest generation that somebody joined, or whose predecessor lost a connection between live workers;
        connections made since then are kept, so that with TCP a death costs no message. None: this generation, all
        connections are made anew. Groups (Gloo, NCCL) are built anew each time.

        Blocks until the connections stand. LinkBroken when it is aborted or a newer generation is wanted meanwhile;
        nothing of it is usable then. Generations only grow.
        """
        new = Generation(generation)
        with self._lock:
            if generation <= self._wanted:
                raise LinkBroken(generation, f"superseded by generation {self._wanted}")
            over = self._take()
            self._wanted, self._building = generation, new
        self._end(over)
        try:
            self._transport.join(new, members, me, generation if base is None else base)
            with self._lock:
                new.check()
                self._building, self._present = None, new
        except BaseException:
            self._end([new])
            raise

    def follow(self, generation: int) -> None:
        """Operations belong to this generation from now on: LinkBroken once another one is present.

        A rebuild takes a millisecond in a thread of its own. Without this, whoever still works by the old plan would
        send and reduce in the new generation, where its peers expect something else.
        """
        self._followed = generation

    def connect(self, workers: Collection[Worker]) -> None:
        """Before the first messages with these workers, of the stages beside this one, in a generation.

        Groups (Gloo, NCCL): blocks until each of them does the same, hence all workers take up the same plans in the
        same order; LinkBroken when the generation ends meanwhile. TCP is connected since `rebuild`.
        """
        self._transport.connect(self._now(), workers)

    def meetings(self, me: Worker, workers: Iterable[Worker]) -> list[tuple[Worker, Pending]]:
        """`connect` with one after the other, for a caller who says whom it waits for. They are to be waited for in
        this order: it is the same one of all pairs, so somebody can always go on."""
        others = sorted({*workers}, key=lambda other: sorted((me, other)))
        return [(other, Pending(partial(self.connect, [other]))) for other in others]

    def send(self, tensor: Tensor, to: Worker, tag: int) -> Pending:
        """Sends a contiguous tensor, which must not be written to until the result's `wait` has returned.

        0 <= tag < MAX_TAG, else ValueError. Does not block. The result may be dropped, the tensor too. Groups (Gloo,
        NCCL): only to workers that `connect` was called with; NCCL's messages between two workers match in the order
        in which both sides ask for them, by no tag.
        """
        return self._transport.send(self._now(), tensor, to, tag)

    def receive(self, tensor: Tensor, frm: Worker, tag: int) -> Pending:
        """Fills a contiguous tensor of the very size that is sent; it may be read when the result's `wait` has
        returned.

        Does not block. After an abort the tensor must not be used again: the message may still arrive in it.
        """
        return self._transport.receive(self._now(), tensor, frm, tag)

    def all_reduce(self, tensors: Sequence[Tensor]) -> Pending:
        """Sums each tensor in place over the live workers of my stage, all of whom call it with the same shapes and
        dtypes.

        Does not block; the sums are there when the result's `wait` has returned. After an abort the tensors hold
        garbage.
        """
        return self._transport.all_reduce(self._now(), tensors)

    def reduce(self, tensors: Sequence[Tensor], to: Worker) -> Pending:
        """The sums for `to` alone, a live worker of my stage; the tensors of its peers hold garbage. Like
        `all_reduce`, and half of what that sends."""
        return self._transport.reduce(self._now(), tensors, to)

    def broadcast(self, tensors: Sequence[Tensor], source: Worker) -> Pending:
        """Copies the tensors of `source`, a live worker of my stage, into those of its peers. Like `all_reduce`."""
        return self._transport.broadcast(self._now(), tensors, source)

    def abort(self) -> None:
        """Ends the present generation and any that is being built: blocked and later operations raise LinkBroken.

        Any thread, any number of times.
        """
        with self._lock:
            over = self._take()
        self._end(over)

    def close(self, timeout: float = 5.0) -> None:
        """abort(), and closes all connections; blocks for `timeout` seconds at most. At the end of a process."""
        self.abort()
        self._transport.close(timeout)

    def _now(self) -> Generation:
        present = self._present
        if present is None:
            raise LinkBroken(self._wanted, "aborted, and not rebuilt yet")
        if self._followed is not None and self._followed != present.number:
            raise LinkBroken(self._followed, f"superseded by generation {present.number}")
        return present

    def _take(self) -> list[Generation]:
        over = [old for old in (self._building, self._present) if old is not None]
        self._building = self._present = None
        return over

    def _end(self, over: list[Generation]) -> None:
        if over:
            for old in over:
                old.end()
            self._transport.end(over)
