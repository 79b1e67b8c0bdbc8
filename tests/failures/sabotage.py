"""Makes workers of a zygote's jobs (see Zygote.preload) fail as RECYCLE_SABOTAGE describes.

RECYCLE_SABOTAGE='{"raise": "ValueError", "stage": 1, "step": 3, "g": 5, "once": "/tmp/flag"}'
RECYCLE_SABOTAGE='{"flip": 1, "step": 3, "once": "/tmp/flag"}'     # a bit of stage 1's weights flips in one worker
RECYCLE_SABOTAGE='{"err": 1, "step": 3, "once": "/tmp/flag"}'      # one worker's update of its sharded state is wrong
RECYCLE_SABOTAGE='{"rot": 1, "step": 3, "once": "/tmp/flag"}'      # a bit of its sharded state flips before the step
RECYCLE_SABOTAGE='{"nan": 1, "steps": [3, 5]}'    # the output of stage 1 is NaN in these steps
RECYCLE_SABOTAGE='{"telemetry": ["Traces.died"]}'        # these telemetry methods always raise
RECYCLE_SABOTAGE='{"end": 1.5}'          # the last heartbeat.json is written 1.5 seconds late
RECYCLE_SABOTAGE='{"census": "/tmp/sizes", "steps": [300, 1500]}'  # appends the size of all objects after these steps
RECYCLE_SABOTAGE='{"census": "/tmp/sizes", "generations": [9, 39]}'  # or in these generations
RECYCLE_SABOTAGE='{"unfit": true}'       # the kernels need more shared memory than the GPU has
RECYCLE_SABOTAGE='{"start": 1}'          # building the model of stage 1 fails
RECYCLE_SABOTAGE='{"foreign": "/tmp/flag", "after": 4}'      # the fifth worker and later ones report another platform
RECYCLE_SABOTAGE='{"suspended": "/tmp/flag", "after": 4}'    # the fifth worker to start suspends itself (SIGSTOP)
RECYCLE_SABOTAGE='{"compile": 2.5}'    # seconds for which a worker holds Python's lock before it is ready
RECYCLE_SABOTAGE='{"clock": 3600}'     # time.time() jumps back and forth by that many seconds, in all processes
RECYCLE_SABOTAGE='{"jump": -3600, "when": "/tmp/flag"}'    # time.time() is shifted by this once the file exists

RECYCLE_SABOTAGE='{"hang": "spin", "stage": 1, "step": 3, "g": 5, "once": "/tmp/flag"}'
    in a forward: sleep (waits without Python's lock), lock (waits with it), spin (computes with it),
    burn (no hang: computes for `seconds` of CPU time)
    while reading data: read (as if the file system did not answer)
    in a checkpoint: save (as if the file system did not answer for `seconds`), copy (the main thread hangs)
    in a sum: reduce (the thread that exchanges the gradients hangs)

once: a file that the first failing process creates and writes its id to. If the file exists, nothing fails. Without
`once`, the failure occurs on every peer.
"""

import ctypes
import functools
import gc
import itertools
import json
import os
import signal
import sys
import time

import torch
from triton.runtime.errors import OutOfResources

from recycle_pp.comm.tcp import collectives
from recycle_pp.data.batches import Batches
from recycle_pp.execution import ready
from recycle_pp.execution.commits import Commits
from recycle_pp.execution.session import Session
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state import checkpoint
from recycle_pp.telemetry.background import Background
from recycle_pp.telemetry.heartbeat import Heartbeat
from recycle_pp.telemetry.lines import Lines
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.recovery import Recovery
from recycle_pp.telemetry.traces import Traces

_init, _forward, _platform, _time = Stage.__init__, Stage.forward, ready.platform, time.time
_step_units = StageOptimizer.step
_batch, _all_reduce, _write_part, _save = (
    Batches.batch,
    collectives.all_reduce,
    checkpoint._write_part,
    checkpoint.Saver.save,
)
_step = -1  # step of this worker's last forward


def sabotage():
    return json.loads(os.environ.get("RECYCLE_SABOTAGE", "{}"))


def init(self, settings, stage, *arguments):
    _init(self, settings, stage, *arguments)
    if sabotage().get("unfit"):
        raise OutOfResources(300000, 232448, "shared memory")
    if sabotage().get("start") == stage:
        raise RuntimeError("sabotaged")


def forward(self, step, g, *arguments):
    global _step
    now, _step = sabotage(), step
    if (now.get("stage"), now.get("step"), now.get("g")) == (self.stage, step, g):
        hang("sleep", "lock", "spin", "burn", seconds=now.get("seconds", 1e6))
    if "raise" in now and (now["stage"], now["step"], now["g"]) == (self.stage, step, g) and _first(now.get("once")):
        raise {"ValueError": ValueError, "OutOfMemoryError": torch.OutOfMemoryError}[now["raise"]]("sabotaged")
    if (now.get("flip"), now.get("step")) == (self.stage, step) and _first(now["once"]):
        self.flat.parts[0].view(torch.int32)[0] ^= 1 << 20
    results = _forward(self, step, g, *arguments)
    if now.get("nan") == self.stage and step in now["steps"]:
        results[0].mul_(torch.nan)
    return results


def step_units(self, reduced, step, *arguments):
    _step_units(self, reduced, step, *arguments)
    now, sharded = sabotage(), reduced.units is not None
    for kind, at in (("err", step), ("rot", step + 1)):
        meant = (now.get(kind), now.get("step")) == (self.tensors.stage, at)
        if meant and sharded and 0 in self.held and _first(now["once"]):
            self.vectors(0)[0].view(torch.int32)[0] ^= 1 << 20
            if kind == "err":
                self._seal(self.held[0])


def hang(*kinds, seconds=1e6):
    now = sabotage()
    if now.get("hang") in kinds and _first(now.get("once")):
        if now["hang"] == "lock":
            ctypes.PyDLL(None).sleep(int(seconds))
        elif now["hang"] == "spin":
            sum(range(1 << 60))  # a single C call, which never releases the lock
        elif now["hang"] == "burn":
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        else:
            ctypes.CDLL(None).usleep(int(1e6 * min(seconds, 1000.0)))


def batch(self, step, g):
    now = sabotage()
    if (now.get("step"), now.get("g")) == (step, g):
        hang("read")
    return _batch(self, step, g)


def all_reduce(*arguments):
    if _step == sabotage().get("step"):
        hang("reduce")
    return _all_reduce(*arguments)


def write_part(*arguments):
    hang("save", seconds=sabotage().get("seconds", 1e6))
    return _write_part(*arguments)


def save(self, step, *arguments, **options):
    if step == sabotage().get("step"):
        hang("copy")
    return _save(self, step, *arguments, **options)


def _first(flag):
    if flag is None:
        return True
    try:
        with open(flag, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def platform(*arguments):
    now = sabotage()
    ctypes.PyDLL(None).usleep(int(1e6 * now.get("compile", 0)))
    if "suspended" in now and _workers_before(now["suspended"]) == now["after"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    foreign = "foreign" in now and _workers_before(now["foreign"]) >= now["after"]
    return "another GPU" if foreign else _platform(*arguments)


def _workers_before(flag):
    """The number of workers that started before this one. Each creates a file whose name begins with `flag`."""
    return next(n for n in itertools.count() if _first(f"{flag}.{n}"))


def census(who, number, of="steps"):
    now = sabotage()
    if "census" in now and number in now.get(of, ()):
        for background in [found for found in gc.get_objects() if isinstance(found, Background)]:
            background.flush(10)  # on a slow machine, lines may still be queued
        gc.collect()
        size = sum(map(sys.getsizeof, gc.get_objects()))
        with open(now["census"], "a") as file:
            file.write(json.dumps([who, number, size]) + "\n")


def committed(self, commit):
    _committed(self, commit)
    census("coordinator", commit.step)


def vote(self, orders, step, *arguments):
    _vote(self, orders, step, *arguments)
    if self._session.participant.worker == (0, 0):
        census("worker", step)


def follow(self, note):
    _follow(self, note)
    if note["event"] == "announced":
        census("coordinator", note["generation"], "generations")


def announced(self, message):
    _announced(self, message)
    if self.participant.worker == (0, 0):
        census("worker", message.generation, "generations")


def failing(cls, name):
    method = getattr(cls, name)

    @functools.wraps(method)
    def fails(*arguments, **named):
        if f"{cls.__name__}.{name}" in sabotage().get("telemetry", ()):
            raise RuntimeError("sabotaged")
        return method(*arguments, **named)

    setattr(cls, name, fails)


def end(self, *arguments):
    time.sleep(sabotage().get("end", 0))
    _end(self, *arguments)


def jumping_time():
    if "jump" in sabotage():
        return _time() + sabotage()["jump"] * os.path.exists(sabotage()["when"])
    return _time() + sabotage().get("clock", 0) * (int(time.monotonic() * 20) % 3 - 1)


Stage.__init__, Stage.forward, ready.platform, time.time = init, forward, platform, jumping_time
_end, Heartbeat.end = Heartbeat.end, end
_committed, Recorder._committed = Recorder._committed, committed
_vote, Commits.vote = Commits.vote, vote
_follow, Recorder._follow = Recorder._follow, follow
_announced, Session._announced = Session._announced, announced
for of, method in (
    (Traces, "died"),
    (Traces, "committed"),
    (Recovery, "announced"),
    (Progress, "step"),
    (Lines, "write"),
):
    failing(of, method)
StageOptimizer.step = step_units
Batches.batch, collectives.all_reduce, checkpoint._write_part, checkpoint.Saver.save = (
    batch,
    all_reduce,
    write_part,
    save,
)
