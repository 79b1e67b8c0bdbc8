"""Adapters in real jobs: deaths change no bit, checkpoints hold only adapters, and exports give the trained model."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from recycle_pp import export
from recycle_pp.model.safetensors_folder import Folder, folder_digest
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state import checkpoint, hf_folder
from recycle_pp.testing.reference_trainer import CPU
from tests.recycle_pp.model.general import models
from tests.recycle_pp.state.test_checkpoint import newest

pytestmark = pytest.mark.timeout(300)
STEPS = 6
TWO = ("parallel=2x2", "parallel.microbatches=6")
ALONE = ("parallel=1x1", "parallel.microbatches=12")
TOKENS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = models.with_weights("qwen2", tmp_path_factory.mktemp("lora"), initializer_range=0.2)
    (at / "text").write_text("the cat sat on the mat. " * 400)
    return at


def command(folder, *more):
    return [
        "model=hf", f"model.path={folder}", "model.lora.rank=4", "model.lora.targets=[q_proj,v_proj]",
        f"data.path={folder / 'text'}", "model.sequence=16", "numerics=reproducible", f"run.steps={STEPS}",
        "optimizer.lr=1e-2", "run.validate_every=3", "checkpoint.every=3", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(zygote_of_transformers, folder, tmp_path_factory):
    """trained(overrides): (run folder, SHA-256 of the weights, losses) of a job; equal jobs run once."""
    known = {}

    def run(*overrides, deaths=0):
        if overrides not in known:
            place = tmp_path_factory.mktemp("run") / "run"
            with zygote_of_transformers.run([*command(folder, *overrides), f"run.dir={place}"]) as job:
                assert job.wait(250) == 0, job.output
                summary = json.loads(job.run.summary.read_text())
                assert summary["deaths"] == deaths, job.output
                losses = [line["loss"] for line in job.run.lines(job.run.metrics)]
            known[overrides] = place, summary["weights_sha256"], losses
        return known[overrides]

    return run


@pytest.mark.parametrize(
    "state",
    [
        ("+fail_at=2:0.1@backward", "+rejoin_at=3:0.1"),
        ("parallel.sharded=true", "optimizer.stagger=true", "+fail_at=3:1.0@allreduce", "+rejoin_at=4:1.0"),
    ],
    ids=["whole", "sharded"],
)
def test_a_death_changes_no_bit_of_the_adapters(state, trained):
    _, weights, losses = trained(*TWO, *state, deaths=1)
    _, expected, others = trained(*ALONE)
    assert weights and (weights, losses) == (expected, others)
    assert losses[-1] < losses[0]


def test_a_checkpoint_holds_only_adapters_and_names_their_base_weights(trained, folder):
    run, *_ = trained(*ALONE)
    path = newest(run / "checkpoints")
    held = checkpoint.shapes(path)
    assert held and all(".lora_A." in name or ".lora_B." in name for name in held)
    about = checkpoint.read_about(path)
    assert (about["model.path"], about["model.path (its contents)"]) == (str(folder), folder_digest(folder))


def test_a_resume_with_different_weights_in_the_folder_is_refused(zygote_of_transformers, folder, tmp_path):
    base = shutil.copytree(folder, tmp_path / "base")
    with zygote_of_transformers.run(
        [*command(base, *ALONE, "run.steps=1", "run.validate_every=0"), f"run.dir={tmp_path}/run"]
    ) as job:
        assert job.wait(100) == 0, job.output
    shutil.copyfile(
        models.with_weights("qwen2", tmp_path / "other", initializer_range=0.1) / "model.safetensors",
        base / "model.safetensors",
    )
    again = command(base, *ALONE, "run.validate_every=0", f"run.dir={tmp_path}/run", "run.resume=true")
    with zygote_of_transformers.run(again) as job:
        assert job.wait(100) == 2, job.output
        assert "model.path (its contents) is" in job.output.splitlines()[-1]


def test_exports_of_adapters_and_of_the_merged_model_have_the_same_logits(trained, folder, tmp_path, capsys):
    import peft
    import transformers

    run, *_ = trained(*ALONE)
    assert export.main([str(run), str(tmp_path / "adapter")]) == 0
    assert export.main([str(run), str(tmp_path / "merged"), "--merge"]) == 0
    assert capsys.readouterr().out.count("tensors of step-000006 in float32") == 2
    load = transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    merged, info = load(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    tokenizer = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter_config.json", "adapter_model.safetensors", *tokenizer]
    with torch.no_grad():
        ours, theirs, before = (model(TOKENS).logits for model in (merged, adapted, load(folder)))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert (theirs - before).norm() > 0.01 * before.norm()
        together = adapted.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, together[name], rtol=1e-6, atol=1e-7)


def test_the_adapters_of_a_conv1d_are_merged_transposed(tmp_path):
    """GPT-2 stores its matrices with the inputs as rows, and some are square."""
    import peft
    import transformers

    at = models.with_weights("gpt2", tmp_path / "gpt2")
    settings = models.of_folder(at, model__init="weights", model__lora__rank=4, model__lora__targets=["c_proj"])
    path = saved(settings, tmp_path)
    for kind, out in ((hf_folder.Adapter, "adapter"), (hf_folder.Merged, "merged")):
        hf_folder.write(kind(asdict(settings), path, torch.float32), tmp_path / out)
    load = transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.PeftModel.from_pretrained(load(at), tmp_path / "adapter").merge_and_unload().state_dict()
    for name, value in load(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(value, adapted[name], rtol=1e-6, atol=1e-7)
    name = "transformer.h.0.attn.c_proj.weight"
    assert (adapted[name] - Folder(at, "transformer").read(name)).abs().max() > 0.01


def saved(settings, tmp_path):
    """A checkpoint of the run's state, with random adapters."""
    stage = Stage(settings, 0, CPU)
    stage.flat.parts[0].normal_(generator=torch.Generator().manual_seed(1))
    saver = checkpoint.Saver(tmp_path)
    part = saver.save(1, 0, StageOptimizer(settings, stage).state()).result()
    return checkpoint.finish(tmp_path, 1, [part], {})


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_documented_command_trains_adapters_through_a_death(trained, folder, tmp_path):
    """The command runs as users launch it."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    deaths = ["+fail_at=2:0.1", f"run.dir={tmp_path}/run", "checkpoint.hf_at_end=true"]
    done = subprocess.run(
        [torchrun, "--nproc-per-node=4", "-m", "recycle_pp.train", *command(folder, *TWO, *deaths)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "hf" / f"step-{STEPS:06}" / "adapter_model.safetensors").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["deaths"], summary["weights_sha256"]) == (1, trained(*ALONE)[1])
