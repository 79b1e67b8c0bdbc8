"""The check of a machine at the start of a job: nothing waits for its process."""

import asyncio
import time

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.supervisor import quick_check
from recycle_pp.supervisor.quick_check import QuickCheck
from recycle_pp.telemetry.run_folder import RunFolder


def test_the_versions_of_this_machine_arrive_once(tmp_path):
    async def check():
        found = asyncio.Queue()
        checking = QuickCheck(found.put_nowait)
        for _ in range(2):
            checking.begin(RunFolder(tmp_path), Settings())
        message = await asyncio.wait_for(found.get(), 60)
        checking.close()
        return message, found.empty()

    message, once = asyncio.run(check())
    assert once and {"python", "torch", "numpy"} <= message.versions.keys()
    assert not {wrong.name for wrong in message.wrong} & {"python", "torch", "numpy", "run folder"}


@pytest.mark.parametrize("body", ["import time; time.sleep(60)", "raise SystemExit(1)", "print('{}')"])
def test_a_check_that_hangs_or_fails_delays_nothing_and_sends_nothing(body, tmp_path, monkeypatch):
    (tmp_path / "stuck.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(quick_check, "MODULE", "stuck")
    sent = []

    async def check():
        checking = QuickCheck(sent.append)
        begun = time.monotonic()
        checking.begin(RunFolder(tmp_path), Settings())
        assert time.monotonic() - begun < 0.2
        while checking._process is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        checking.close()
        return await asyncio.to_thread(checking._process.wait, 20)

    assert asyncio.run(check()) is not None and not sent
