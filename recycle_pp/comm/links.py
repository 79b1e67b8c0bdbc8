"""Messages and sums among the members of a generation.

    links = Links(transport)                        # see execution.transports
    links.rebuild(generation, members, me)          # members: process -> worker; in a thread that can be abandoned
    links.member(Worker(0, 1))                      # the process that runs as this worker
    links.connect({1, 6})                           # prepares messages with members 1 and 6
    work = links.receive(buffer, frm=1, tag=17)
    links.send(tensor, to=6, tag=18)
    links.all_reduce([gradient, losses]).wait()     # in place, over the live members of this stage
    links.abort()                                   # from any thread: all of the above raise LinkBroken

The executor communicates only through this interface. Many receives and sends may be pending, in any order, if their
tags are unique.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from recycle_schedules import Worker
from torch import Tensor

from recycle_pp.wire.messages.members import Assignment, Member

from .transport import Transport
from .waiting import Generation, LinkBroken, Pending


class Links:
    """Messages and sums among the members of the current generation, carried by `transport`.

    Every method may be called from any thread. No method holds a lock while it blocks.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._lock = threading.Lock()
        self._wanted = -1  # highest generation for which `rebuild` was called
        self._present: Generation | None = None
        self._building: Generation | None = None
        self._followed: int | None = None  # the only generation whose operations are allowed; None: any

    @property
    def generation(self) -> int:
        """Number of the current generation; -1 before the first rebuild and after an abort."""
        present = self._present
        return -1 if present is None else present.number

    @property
    def ordered(self) -> bool:
        """Whether the members of a stage can exchange only sums and broadcasts with each other, all in the same order.
        True for groups (Gloo, NCCL). With TCP, any two members of a stage can also exchange messages."""
        return self._transport.ordered

    def rebuild(self, generation: int, members: Assignment, me: Member, base: int | None = None) -> None:
        """Makes `generation` the current one. Every member calls `rebuild` with the same arguments except `me`.

        members: member (process) -> its worker (pipeline and stage)
        base: connections made in generation `base` or later are kept. None: no connection is kept. `base` is the last
            generation that made all connections again, because a member had joined or because a connection between
            live members had broken. With TCP a death thus costs no message. Groups (Gloo, NCCL) are kept only if all
            their members agree that no operation is pending.

        Blocks until all connections are established. Raises LinkBroken if the rebuild is aborted, or if an equal or
        newer generation has been requested. Then `generation` cannot be used.
        """
        new = Generation(generation, members)
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
        """Binds later operations to this generation. They raise LinkBroken while another generation is current.

        A rebuild runs in a separate thread and takes a millisecond. Without this check, an executor that still follows
        the old plan could send and reduce in the new generation. Its peers expect other messages there.
        """
        self._followed = generation

    @property
    def members(self) -> Assignment:
        """Member (process) -> its worker (pipeline and stage), in the followed generation.

        Raises LinkBroken if this generation has ended, because the current one may have different members."""
        return self._now().members

    def received(self) -> int | None:
        """Bytes that the present connections have received, including incomplete messages. The number changes while a
        message arrives, and may fall when a connection ends. None: the transport does not know it (Gloo, NCCL)."""
        return self._transport.received()

    def member(self, worker: Worker) -> Member:
        """The member (process) that runs as this worker. Raises LinkBroken if the followed generation has ended."""
        return self._now().member(worker)

    def connect(self, members: Collection[Member]) -> None:
        """Prepares messages with these members of other stages, once per generation.

        Groups (Gloo, NCCL): blocks until each of these members calls `connect`, so all members must adopt the same
        plans in the same order. Raises LinkBroken if the generation ends first. TCP: does nothing, because `rebuild`
        has made the connections.
        """
        self._transport.connect(self._now(), members)

    def meetings(self, me: Member, members: Iterable[Member]) -> list[tuple[Member, Pending]]:
        """(member, pending `connect` to it) for each member, so that the caller can report which member it waits for.

        Wait for the results in the returned order. All members use the same global order of pairs, so some pair can
        always proceed."""
        others = sorted({*members}, key=lambda other: sorted((me, other)))
        return [(other, Pending(partial(self.connect, [other]))) for other in others]

    def send(self, tensor: Tensor, to: Member, tag: int) -> Pending:
        """Sends a contiguous tensor, which must not be written to until the result's `wait` has returned.

        Raises ValueError unless 0 <= tag < MAX_TAG. Does not block. The caller may drop its references to the result
        and the tensor. Groups (Gloo, NCCL): `to` must have been passed to `connect`. NCCL ignores tags and matches the
        messages between two members in the order of both sides' calls.
        """
        return self._transport.send(self._now(), tensor, to, tag)

    def receive(self, tensor: Tensor, frm: Member, tag: int) -> Pending:
        """Receives into a contiguous tensor of exactly the sent size. It may be read when the result's `wait` has
        returned.

        Does not block. After an abort do not use the tensor again, because the message may still be written to it.
        """
        return self._transport.receive(self._now(), tensor, frm, tag)

    def all_reduce(self, tensors: Sequence[Tensor]) -> Pending:
        """Sums each tensor in place over the live members of this member's stage. All of them must make the call, with
        the same shapes and dtypes.

        Does not block. The sums are complete when the result's `wait` has returned. After an abort the contents of the
        tensors are undefined.
        """
        return self._transport.all_reduce(self._now(), tensors)

    def reduce(self, tensors: Sequence[Tensor], to: Member) -> Pending:
        """Like `all_reduce`, but only `to` receives the sums. `to` must be a live member of this member's stage.

        Sends half as much data. The contents of the other members' tensors are undefined."""
        return self._transport.reduce(self._now(), tensors, to)

    def broadcast(self, tensors: Sequence[Tensor], source: Member) -> Pending:
        """Copies the tensors of `source`, a live member of this member's stage, to its peers. Otherwise like
        `all_reduce`."""
        return self._transport.broadcast(self._now(), tensors, source)

    def abort(self) -> None:
        """Ends the current generation and any generation being built. Blocked and later operations raise LinkBroken.

        May be called from any thread, any number of times.
        """
        with self._lock:
            over = self._take()
        self._end(over)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all generations and closes all connections, at the end of a process. Blocks for at most `timeout`
        seconds."""
        self.abort()
        self._transport.close(timeout)

    def _now(self) -> Generation:
        present = self._present
        if present is None:
            raise LinkBroken(self._wanted, "aborted and not yet rebuilt")
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
