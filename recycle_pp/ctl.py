"""Sends a request to a running job: stop, drain, checkpoint, stacks, profile, set.

    python -m recycle_pp.ctl runs/mine stop                       # save and end; returns when no process is left
    python -m recycle_pp.ctl runs/mine checkpoint                 # save at the next commit
    python -m recycle_pp.ctl runs/mine drain 1.2                  # worker 1.2 hands over its work and leaves
    python -m recycle_pp.ctl runs/mine stacks 1.2                 # print the stacks of all threads of worker 1.2
    python -m recycle_pp.ctl runs/mine profile 1.2 --steps 3      # write a trace of torch's profiler
    python -m recycle_pp.ctl runs/mine set checkpoint.every=50    # change a setting while the job runs

Works on any node that can connect to the job. Instead of the run folder, you can give the HOST:PORT of any of the job's
supervisors. For a job on several nodes, RECYCLE_TOKEN must be set in the environment; for a job on one node, the token
is read from the job's private file. Exit code 0: done; 1: the job has stopped, but some of its processes have not
exited; 2: refused, with one sentence. docs/ctl.md has an example of each request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from recycle_pp.command import exit_code, parser_of
from recycle_pp.consensus.refusal import Refusal
from recycle_pp.telemetry.heartbeat import Sign
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.authentication import Refused
from recycle_pp.wire.connection import ChannelClosed, Peer, connect
from recycle_pp.wire.files import UnreadableFile
from recycle_pp.wire.launch import HOST_AND_PORT, TOKEN_VARIABLE, host_and_port, joined, token_of
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.ctl import (
    TO_OPERATOR,
    Another,
    Begun,
    ChangeSettings,
    Done,
    Drain,
    Elsewhere,
    Ended,
    NotDone,
    ReadStacks,
    RecordProfile,
    Stop,
    TakeCheckpoint,
    Value,
)
from recycle_pp.wire.messages.handshake import OperatorHello
from recycle_pp.wire.messages.table import Message

FIND_SECONDS = 30.0  # time limit for a coordinator to answer; the job may be electing one
AGAIN = 0.5  # seconds between attempts to find the coordinator
END_SECONDS = 90.0  # time limit for the processes to exit after the job has ended
LOOK_SECONDS = 0.2  # seconds between checks for whether the processes have exited
CONNECT_SECONDS = 5.0
SUCCESSOR_SECONDS = 5.0  # during a request: seconds between checks for whether another coordinator has taken over


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0; 1 if processes of a stopped job are left; 2 after printing a sentence about a
    refusal."""
    return exit_code(lambda: _run(arguments), "recycle_pp")


def _run(arguments: Sequence[str]) -> int:
    given = _parser().parse_args(arguments)
    job = Job(given.run)
    answer = asyncio.run(job.ask(_request(given)))
    if isinstance(answer, Done):
        print(answer.text)
        return 0
    print(f"the job has ended: {answer.reason}", flush=True)
    left = asyncio.run(still_there(answer.places, job.token, END_SECONDS))
    for place in left:
        print(f"recycle_pp: the supervisor at {place} has not ended", file=sys.stderr)
    if not left:
        print("no process of the job is left")
    return 1 if left else 0


def _parser() -> argparse.ArgumentParser:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = parser_of("ctl", about, more)
    parser.add_argument("run", metavar="RUN", help="the run folder, or HOST:PORT of a supervisor of the job")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("stop", help="finish the step, save a checkpoint and end all processes on all nodes")
    verbs.add_parser("checkpoint", help="save a checkpoint at the next commit, and wait until it is complete")
    drain = verbs.add_parser("drain", help="let a worker hand over its work at the next commit and leave")
    drain.add_argument(
        "--force",
        action="store_true",
        help="drain even the last worker of a stage; all other workers then restart from a checkpoint",
    )
    stacks = verbs.add_parser("stacks", help="print the stacks of all threads of a worker")
    profile = verbs.add_parser("profile", help="record a trace of torch's profiler")
    profile.add_argument("--steps", type=int, default=3, metavar="N", help="number of steps (default: 3)")
    for verb in (drain, stacks, profile):
        verb.add_argument("worker", metavar="D.S", help="the worker, for instance 1.2")
    change = verbs.add_parser("set", help="change settings while the job runs")
    change.add_argument("changes", nargs="+", metavar="KEY=VALUE")
    return parser


def _request(given: argparse.Namespace) -> Message:
    """The message for the parsed command line. Raises ValueError if a worker, a number or a setting is malformed."""
    match given.verb:
        case "stop":
            return Stop()
        case "checkpoint":
            return TakeCheckpoint()
        case "set":
            return ChangeSettings(dict(map(_setting, given.changes)))
    worker = _worker(given.worker)
    match given.verb:
        case "drain":
            return Drain(worker, given.force)
        case "stacks":
            return ReadStacks(worker)
    if given.steps < 1:
        raise ValueError(f"--steps must be at least 1, not {given.steps}")
    return RecordProfile(worker, given.steps)


def _worker(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"[0-9]{1,5}\.[0-9]{1,5}", text):
        raise ValueError(f"a worker is D.S, pipeline and stage, for instance 1.2, not {text!r}")
    pipeline, stage = map(int, text.split("."))
    return pipeline, stage


def _setting(text: str) -> tuple[str, Value]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a change is KEY=VALUE, for instance checkpoint.every=50, not {text!r}")
    try:
        found = json.loads(value)
    except ValueError:
        found = value
    return key, found if isinstance(found, bool | int | float | str | None) else value


class Job:
    """A running job.

    run: the argument RUN of the command line

    Raises ValueError if no job runs there, or if no token for the job is found.
    """

    def __init__(self, run: str, environment: Mapping[str, str] = os.environ) -> None:
        self._run = run
        self._begun = False  # whether a coordinator has accepted the request
        self._job_id = ""  # of the job that writes into the run folder; "" without a folder
        self._folder = None if HOST_AND_PORT.fullmatch(run) and not os.path.isdir(run) else RunFolder(run)
        if self._folder is not None:
            self._folder.require()
        kept = None if self._folder is None else token_of(self._folder.path)
        self._tokens = [token for token in (environment.get(TOKEN_VARIABLE), kept) if token]
        self._address()  # raises at once if no job runs
        if not self._tokens:
            raise ValueError(f"set {TOKEN_VARIABLE}: this user did not start the job in {run} on this machine")

    @property
    def token(self) -> str:
        """The token that the job has accepted; before the first answer, the most likely one."""
        return self._tokens[0]

    async def ask(self, request: Message) -> Done | Ended:
        """Sends a request, and returns the coordinator's final answer. Prints its earlier answers.

        Repeats the request if the coordinator is lost. Raises ValueError, with a sentence for the user, if the request
        is refused or no coordinator answers.
        """
        loop = asyncio.get_running_loop()
        deadline, place, waits = loop.time() + FIND_SECONDS, self._address(), False
        while True:
            error = "the supervisor there does not know the coordinator yet"
            try:
                peer = await connect(*place, self.token, OperatorHello(self._job_id), CONNECT_SECONDS)
                peer.send(request)
                answer = await self._follow(peer, joined(*place))
            except Refused as refused:
                if len(self._tokens) == 1:
                    raise ValueError(
                        f"the job at {place[0]}:{place[1]} does not accept this {TOKEN_VARIABLE}"
                    ) from refused
                self._tokens.pop(0)
                continue
            except OSError as failure:  # including ChannelClosed
                error, place = str(failure) or "no connection in time", self._address()
                if self._begun:  # the coordinator was lost while it carried out the request
                    self._begun, deadline = False, loop.time() + FIND_SECONDS
            else:
                if not isinstance(answer, Elsewhere):
                    return answer
                if answer.leader is not None and loop.time() < deadline:
                    place = answer.leader.host, answer.leader.port
                    continue
            if loop.time() > deadline:
                raise ValueError(f"no job answers at {place[0]}:{place[1]}: {error}")
            if not waits:
                waits = True
                print("recycle_pp: waits for the coordinator; the job may be electing one", file=sys.stderr, flush=True)
            await asyncio.sleep(AGAIN)

    async def _follow(self, peer: Peer, address: str) -> Done | Ended | Elsewhere:
        """The last answer to a request. Raises ChannelClosed if the coordinator is lost.

        address: HOST:PORT of the peer
        """
        before = self._leader()
        try:
            while True:
                message = asyncio.ensure_future(peer.recv(TO_OPERATOR))
                # A suspended coordinator's connection stays open, so this loop must look for a new coordinator itself.
                while not (await asyncio.wait([message], timeout=SUCCESSOR_SECONDS))[0]:
                    if (leader := self._leader()) and leader != before and leader[1] != address:
                        raise ChannelClosed(f"the coordinator at {leader[1]} has taken over")
                match message.result():
                    case Begun(text):
                        self._begun = True
                        print(f"recycle_pp: {text}", file=sys.stderr, flush=True)
                    case NotDone(reason):
                        raise ValueError(reason)
                    case Another():  # either the folder's job has ended, or it has just been started again
                        raise ChannelClosed("another job has this address")
                    case (Done() | Ended() | Elsewhere()) as answer:
                        return answer
        finally:
            message.cancel()
            peer.close()

    def _leader(self) -> tuple[int, str] | None:
        """(term, HOST:PORT) of the newest coordinator; None if unknown."""
        with suppress(UnreadableFile):
            if self._folder is not None and (sign := Sign.read(self._folder)) is not None:
                return sign.term, sign.address
        return None

    def _address(self) -> tuple[str, int]:
        """(host, port) from the command line, or of the coordinator. Raises ValueError if the job has ended."""
        if self._folder is None:
            return host_and_port(self._run, "RUN", " or a run folder")
        sign = Sign.read(self._folder)
        if sign is None or sign.over:
            proof = "there is no heartbeat.json" if sign is None else f"it ended with exit code {sign.code}"
            raise ValueError(f"no job runs in {self._run}: {proof}")
        self._job_id = sign.job_id
        return host_and_port(sign.address, f"the address in {self._folder.heartbeat}")


async def still_there(places: Sequence[Place], token: str, seconds: float) -> list[Place]:
    """Waits until the supervisors at these addresses have exited. Their workers have then exited too.

    Returns the addresses of supervisors that still run after `seconds`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    left = {place: Refusal() for place in places}
    while left and loop.time() < deadline:
        ended = await asyncio.gather(*(_has_ended(place, refusal, token) for place, refusal in left.items()))
        left = {place: refusal for (place, refusal), over in zip(left.items(), ended, strict=True) if not over}
        await asyncio.sleep(LOOK_SECONDS if left else 0.0)
    return list(left)


async def _has_ended(place: Place, refusal: Refusal, token: str) -> bool:
    try:
        (await connect(place.host, place.port, token, OperatorHello(), CONNECT_SECONDS)).abort()
    except ConnectionRefusedError:
        return refusal.lasts(place.process)
    except OSError:
        pass
    refusal.reset()
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
