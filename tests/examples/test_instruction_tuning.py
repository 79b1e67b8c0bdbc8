"""The instruction-tuning example, launched the way users launch it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_pp.telemetry.run_folder import RunFolder
from tests.recycle_pp.data.chat import chats
from tests.recycle_pp.model.general import models

EXAMPLE = Path(__file__).parents[2] / "examples" / "instruction_tuning.sh"
STEPS = 4


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.timeout(500)
def test_a_death_changes_no_bit_and_the_export_has_the_chat_template(tmp_path):
    folder = models.with_weights("qwen2", tmp_path / "model", vocab_size=264, initializer_range=0.2)
    chats.tokenizer(folder)
    path = chats.many(tmp_path / "chats.jsonl", 200)
    small = ["model.sequence=160", f"run.steps={STEPS}", "run.validate_every=0", "optimizer.lr=1e-2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    ends = []
    for deaths in ([], ["+fail_at=2:1.1@backward"]):
        place = tmp_path / f"run{len(ends)}"
        command = ["sh", EXAMPLE, folder, path, *small, f"run.dir={place}", *deaths]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        run = RunFolder(place)
        summary = json.loads(run.summary.read_text())
        assert summary["deaths"] == len(deaths)
        ends.append((summary["weights_sha256"], [line["loss"] for line in run.lines(run.metrics)]))
        exported = place / "hf" / f"step-{STEPS:06}"
        assert chats.CHATML in json.loads((exported / "tokenizer_config.json").read_text())["chat_template"]
    assert ends[0] == ends[1]
