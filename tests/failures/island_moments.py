"""Makes a worker kill a process at a given moment of an island's round. For a zygote's jobs (see Zygote.preload).

RECYCLE_ISLAND_KILL='{"moment": "upload", "round": 1, "once": "/tmp/flag", "victim": "/tmp/pid"}'

The first worker that reaches the moment kills a process.

moment  key of MOMENTS
round   number of the round
once    a file that this worker creates, so that there is only one kill
victim  a file that contains the id of the process to kill; the worker waits for it. If empty, the worker kills itself

RECYCLE_ISLAND_KILL='{"passive": true}'      # this island never closes a round
"""

import json
import os
import signal
import time

from recycle_pp.islands.client import Client
from recycle_pp.islands.reader import Reader
from recycle_pp.storage.store import Store

MOMENTS = {
    "cut": "before the cut",
    "upload": "while uploading",
    "uploaded": "after the upload, before the close",
    "close": "at the close",
    "read": "while reading",
    "apply": "while applying",
}
_cut, _upload, _checksums = Client.cut, Client._upload, Client._checksums
_put, _put_if_absent, _delta = Store.put, Store.put_if_absent, Reader.delta


def orders():
    return json.loads(os.environ.get("RECYCLE_ISLAND_KILL", "{}"))


def reached(moment, number):
    now = orders()
    if (now.get("moment"), now.get("round")) != (moment, number):
        return
    try:
        os.close(os.open(now["once"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    while not os.path.exists(now["victim"]):
        time.sleep(0.01)
    with open(now["victim"]) as file:
        pid = file.read()
    os.kill(int(pid or os.getpid()), signal.SIGKILL)
    # If the launcher was killed, this worker dies while it sleeps. If the coordinator was killed, it continues.
    time.sleep(0.2)


def cut(self, order):
    reached("cut", order.state.applied)
    _cut(self, order)


def put(self, path, content):
    _put(self, path, content)
    if path.endswith(".delta"):
        reached("upload", int(path.split("/")[1]))  # other objects of this delta are not uploaded yet


def upload(self, store, view, cut, turns):
    _upload(self, store, view, cut, turns)
    reached("uploaded", cut.number)


def put_if_absent(self, path, content):
    if not path.endswith("closed.json"):
        return _put_if_absent(self, path, content)
    if orders().get("passive"):
        return False
    first = _put_if_absent(self, path, content)
    reached("close", int(path.split("/")[1]))
    return first


def delta(self, unit, digest, number, island):
    values = _delta(self, unit, digest, number, island)
    reached("read", number)  # the deltas of other units and islands are not read yet
    return values


def checksums(self, applied, theta):
    reached("apply", applied - 1)  # theta and the weights have been replaced, but the optimizer has not stepped yet
    return _checksums(self, applied, theta)


Client.cut, Client._upload, Client._checksums = cut, upload, checksums
Store.put, Store.put_if_absent, Reader.delta = put, put_if_absent, delta
