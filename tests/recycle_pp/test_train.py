"""The entry point reports every mistake in one sentence, with exit code 2, before any worker starts."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recycle_pp import train
from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.state import checkpoint
from recycle_pp.state.survey import Survey, survey
from recycle_pp.telemetry import startup
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.launch import Launch

pytestmark = pytest.mark.timeout(120)

# (overrides, a part of the sentence). The launch has 12 processes.
MISTAKES = [
    # keys
    (["run.stepz=3"], "run.stepz is not a configuration key; did you mean run.steps?"),
    (["+fish=3"], "fish is not a configuration key; allowed: model, data, "),
    (["++model.fish=3"], "model.fish is not a configuration key"),
    (["stepz=100"], "stepz is not a configuration key; did you mean islands.steps or run.steps?"),
    (["lr=1e-3"], "lr is not a configuration key; did you mean optimizer.lr or islands.lr?"),
    (["seed=3"], "seed is not a configuration key; did you mean run.seed?"),
    (["model=big"], "model=big: there is no such file in configs/model/; allowed: bench17m, "),
    (["emulate=null"], "emulate takes the name of a file in configs/emulate/: none, sleep; not 'null'"),
    (["run.steps.x=3"], "run.steps must be a whole number"),
    (["~model"], "~model: a setting cannot be deleted"),
    (["steps"], "'steps' is not a setting; allowed: KEY=VALUE"),
    (["no/such/run.yaml"], "no/such/run.yaml: there is no such file; recycle init no/such/run.yaml writes one"),
    (["--frobnicate"], "--frobnicate is not an option; allowed: --help, --config-dir DIR"),
    (["--config-dir=/no/such/folder"], "--config-dir must name a folder"),
    # paths
    (["run.dir=~nosuchuser/run"], "~nosuchuser/run: there is no user nosuchuser"),
    (["model.path=~nosuchuser/model"], "~nosuchuser/model: there is no user nosuchuser"),
    (["data.path=['~nosuchuser/text']"], "~nosuchuser/text: there is no user nosuchuser"),
    ([f"run.dir={'x' * 300}"], ": File name too long"),
    ([f"data.path={'x' * 300}"], ": File name too long"),
    (["run.dir=s3://bucket/x"], "run.dir must be the path of a folder, not the URL s3://bucket/x; checkpoint.store "),
    # types
    (["run.steps=many"], "run.steps must be a whole number, not 'many'"),
    (["run.steps=1.5"], "run.steps must be a whole number, not 1.5"),
    (["run.steps=null"], "run.steps must be a whole number, not null"),
    (["run.steps=1,2"], "run.steps=1,2 has several values; a list goes in brackets"),
    (["run.resume=3"], "run.resume must be one of true, false, auto, not 3"),
    (["run.standby=true"], "run.standby must be one of auto, on, off, not true"),
    (["schedule.rebalance=true"], "schedule.rebalance must be one of auto, always, never, not true"),
    (["parallel.memory=80"], "parallel.memory must be auto, null or a size like 80GB, not 80"),
    (["parallel.memory=2e9"], "parallel.memory must be auto, null or a size like 80GB, not 2000000000.0"),
    (["run.resume=maybe"], "run.resume must be one of true, false, auto, not maybe"),
    (["optimizer.lr=fast"], "optimizer.lr must be a number, not 'fast'"),
    (["model.split=[1,a]"], "model.split must be auto, null or a list of whole numbers, not [1, 'a']"),
    (["model.split=[2,2"], "model.split=[2,2: no such value"),
    (["run.dir=${nowhere}"], "run.dir: Interpolation key 'nowhere' not found"),
    # ranges
    (["run.steps=0"], "run.steps must be at least 1, not 0"),
    (["parallel.microbatches=-6"], "parallel.microbatches must be at least 1, not -6"),
    (["optimizer.lr=-0.1"], "optimizer.lr must be above 0, not -0.1"),
    (["optimizer.lr=nan"], "optimizer.lr must be finite, not nan"),
    (["optimizer.min_lr=1"], "optimizer.min_lr must be at most optimizer.lr"),
    (["optimizer.clip=0"], "optimizer.clip must be above 0, not 0.0"),
    (["model.dropout=1"], "model.dropout must be at least 0 and below 1, not 1.0"),
    (["numerics.precision=fp8"], "numerics.precision must be one of fp32, bf16, bf16-autocast, not fp8"),
    (["numerics.sums=int16"], "numerics.sums must be one of int64, int32, not int16"),
    (
        ["optimizer.moments=bf16", "optimizer.beta2=0.999"],
        "optimizer.beta2 must be at most 0.996 with optimizer.moments=bf16, not 0.999: a slower decay is lost",
    ),
    (["numerics.sums=int32"], "numerics.sums=int32 needs numerics.reproducible=true"),
    (
        ["numerics=reproducible", "numerics.sums=int32", "parallel.microbatches=22"],
        "numerics.sums=int32 sums at most 64 micro-batches a step",
    ),
    (["model=llama"], "model.path must name a folder with a config.json (model=llama), not null"),
    (["model.qk_norm=true"], "model.qk_norm belongs to model=llama"),
    (["schedule.backward=both"], "schedule.backward must be one of decoupled, coupled, mixed"),
    (["emulate.mode=nap"], "emulate.mode must be one of null, sleep, not nap"),
    (["parallel.backend=mpi"], "parallel.backend must be one of auto, tcp, gloo, nccl"),
    (["parallel.backend=nccl", "run.device=cpu"], "parallel.backend=nccl needs GPUs"),
    (
        ["parallel.sharded=true", "optimizer=staggered", "control.mismatch=third"],
        "control.mismatch=third cannot be combined with optimizer.stagger",
    ),
    (
        ["parallel.sharded=true", "parallel.optimizer_copies=0", "control.mismatch=third"],
        "control.mismatch=third needs parallel.sharded=true and parallel.optimizer_copies above 0",
    ),
    (["parallel.sharded=true", "emulate=sleep"], "parallel.sharded needs real compute"),
    (["parallel.optimizer_copies=-1"], "parallel.optimizer_copies must be at least 0"),
    (
        ["run.on_event=/no/such/command --flag"],
        "run.on_event must be a shell command; /bin/sh finds no /no/such/command",
    ),
    (["run.on_event=nosuchcommand"], "run.on_event must be a shell command; /bin/sh finds no nosuchcommand"),
    (["control.address=somewhere"], "control.address must be HOST:PORT or null"),
    (["control.suspicion=0.1"], "control.suspicion must be above control.heartbeat = 0.5"),
    # shapes
    (["parallel.stages=5"], "3 * 5 = 15 workers, but 12 processes were launched; use torchrun --nproc-per-node=15"),
    (["model.layers=3"], "model.layers must be at least parallel.stages = 4"),
    (["model.split=even"], "model.split must be auto, null or a list of whole numbers, not even"),
    (["model.split=[2,2,2]"], "model.split must be auto, null or parallel.stages = 4 numbers above 0"),
    (["model.split=[2,2,4,0]"], "model.split must be auto, null or parallel.stages = 4 numbers above 0"),
    (["model.split=[2,2,2,3]"], "model.split must add up to model.layers = 8; [2, 2, 2, 3] adds up to 9"),
    (["model.heads=3"], "model.heads must divide model.width = 64, but 3 does not"),
    (["model.kv_heads=3"], "model.kv_heads must divide model.heads = 4, but 3 does not"),
    (["model.heads=64", "model.kv_heads=1"], "model.width / model.heads must be even"),
    (["model.vocabulary=100"], "model.vocabulary must be at least 256 for text"),
    # models
    (["model.layers=blocks"], "model.layers must be a whole number of at least 1, not blocks"),
    (["model.build=my:build"], "model.build needs model=custom; it must be null here"),
    (["model.kind=keras"], "model.kind must be one of transformer, llama, custom, hf, not keras"),
    (
        ["model=custom"],
        "model.build must be MODULE:FUNCTION with model=custom, for instance my_package:build, not null",
    ),
    (["model=custom", "model.build=mine", "model.layers=blocks"], "model.build must be MODULE:FUNCTION"),
    (["model=custom", "model.build=my:build"], "model.layers must be the name of the model's list of layers"),
    (["model=hf"], "model.path must name a folder with a config.json, not null"),
    (["model=hf", "model.path=EMPTY_FOLDER"], "model.path must name a folder with a config.json"),
    (["model=hf", "model.path=CONFIG_ONLY"], "contains no model.safetensors; use model.init=random to train"),
    (["model=hf", "model.path=CONFIG_ONLY", "model.init=random", "model.layers=3"], "null or a name with model=hf"),
    # faults
    (
        ["+fail_at=20:3.2"],
        "there is no worker 3.2; with parallel.pipelines=3 and parallel.stages=4 the workers are 0.0",
    ),
    (["+fail_at=[20:1.2,21:0.4]"], "there is no worker 0.4"),
    (["+hang_at=60:1.2"], "there is no such step; with run.steps=60 the steps are 0 to 59"),
    (["+fail_at=20:1.2@lunch"], "there is no moment 'lunch'; allowed: forward, backward, weight"),
    (["+fail_at=W12"], "fail_at must be STEP:D.S or STEP:D.S@MOMENT, for instance 20:1.2, not 'W12'"),
    (["+fail_at=20:1.2,31:0.1"], "a list goes in brackets, 'fail_at=[20:1.2,31:0.1]'"),
    (["+fail_at=20:1.2", "+fail_at=31:0.1"], "fail_at is given twice; several faults go in one list"),
    (["+rejoin_at=40:1.2"], "rejoin_at=40:1.2 needs an earlier fail_at or hang_at of worker 1.2"),
    (["+rejoin_at=40:9.9"], "there is no worker 9.9"),
    (["+slow_at=3:1.2@x"], "the factor must be a number of at least 1"),
    # data
    (["data.path="], "data.path must name a text file, a folder of text or a .bin file, not ''"),
    (["data.path=/no/such/file"], "a .bin file, not '/no/such/file'"),
    (["data.path=EMPTY_FILE"], "data.path must contain data"),
    (["data.path=EMPTY_FOLDER"], "data.path must contain data"),
    (["data.path=SHORT_FILE"], "data.path must contain at least one sample of model.sequence + 1 = 65 tokens"),
    (["data.path=SHORT_FILE", "model.sequence=16"], "data.validation_share must leave at least 33 held-out tokens"),
    (["data.path=hf://a/b:train"], "hf://a/b:train needs a data.tokenizer: a dataset from the hub contains text"),
    (["data.path=[SHORT_FILE,'hf://a/b']"], "hf://a/b needs a data.tokenizer"),
    (["data.path=[]"], "data.path must name at least one source, not []"),
    (
        ["data.path=[SHORT_FILE,MISSING]", "data.weights=[1]"],
        "one number for each of the 2 sources of data.path, not 1",
    ),
    (["data.path=[SHORT_FILE,SHORT_FILE]", "data.weights=[1,-1]"], "data.weights must be above 0, not -1.0"),
    (["data.path=[SHORT_FILE,MISSING]"], "data.path: MISSING does not exist"),
    (["data.path=SHORT_FILE", "data.tokenizer=MISSING"], "data.tokenizer must be bytes, a tokenizer.json or a folder"),
    (["data.separator=x"], "data.separator needs a data.tokenizer"),
    (["data.document_mask=true"], "the token that separates documents of Python's standard library is unknown"),
    (["data.dtype=float32"], "data.dtype must be one of auto, uint16, uint32, not float32"),
    (["data.path=BIG_FILE", "data.tokenizer=bytes"], "data.path holds 0.3 GB of text, too much to tokenise while 11"),
    # the optimizer
    (["optimizer.schedule=step"], "optimizer.schedule must be one of cosine, linear, constant, wsd"),
    (["optimizer.build=my:Optimizer"], "optimizer.build needs optimizer.name=custom; it must be null here"),
    (["optimizer.decay=0"], "optimizer.decay must be above 0 and at most 1, not 0.0"),
    (["optimizer.groups=[norm]"], "optimizer.groups must be PATTERN:LR or PATTERN:LR:DECAY"),
    (["checkpoint.hf_at_end=true", "emulate=sleep"], "checkpoint.hf_at_end needs real compute"),
    # the run folder
    (["run.dir="], "run.dir must be the path of a folder, not ''"),
    (["run.dir=EMPTY_FILE"], "is a file"),
    (["run.dir=OTHER_RUN"], "contains another run; continue it with run.resume=true"),
    (["run.dir=EMPTY_FOLDER", "run.resume=true"], "run.resume=true needs a checkpoint to continue from"),
    (
        ["run.dir=OTHER_RUN", "run.resume=true", "run.steps=1"],
        "OTHER_RUN has completed 1 step, and run.steps=1; raise run.steps",
    ),
    (["run.dir=OTHER_RUN", "run.resume=true", "run.seed=1"], "run.seed must stay 0 when"),
    (["run.dir=OTHER_RUN", "run.resume=true", "model.width=128"], "model.width must stay 64 when"),
    (["run.dir=OTHER_RUN", "run.resume=true", "parallel.microbatches=5"], "microbatches must stay 18 when"),
    (["run.dir=OTHER_RUN", "run.resume=true", "parallel=4x3"], "must divide the 18 micro-batches of a step"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files and folders for the mistakes above."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "EMPTY_FILE").touch()
    (folder / "EMPTY_FOLDER").mkdir()
    (folder / "CONFIG_ONLY").mkdir()
    (folder / "CONFIG_ONLY" / "config.json").write_text('{"vocab_size": 300}')
    (folder / "SHORT_FILE").write_text("x" * 40)
    with (folder / "BIG_FILE").open("wb") as file:
        file.truncate(300_000_000)  # a sparse file
    _, run, *_ = train.prepare(Launch(world=12, local_world=12), [f"run.dir={folder / 'OTHER_RUN'}"])
    run.metrics.write_text('{"step": 0}\n')
    (run.checkpoints / "step-000001").mkdir()
    (run.checkpoints / "step-000001" / ".metadata").touch()
    (run.checkpoints / "step-000001" / "about.json").write_text('{"step": 1, "files": {".metadata": [0, 0]}}')
    run.unlock()
    return folder


@pytest.mark.parametrize(("overrides", "sentence"), MISTAKES, ids=[" ".join(mistake[0]) for mistake in MISTAKES])
def test_a_mistake_is_reported_in_one_sentence_with_exit_code_2(overrides, sentence, places, monkeypatch, capsys):
    monkeypatch.chdir(places)
    monkeypatch.setattr(train, "supervise", lambda *_: pytest.fail("a worker would have been started"))
    monkeypatch.setattr(startup, "SECONDS", 600)  # no progress lines, however slow the machine is
    for name, value in {"RANK": 0, "WORLD_SIZE": 12, "LOCAL_WORLD_SIZE": 12, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    before = sorted(places.rglob("*"))
    assert train.main(overrides) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("recycle_pp: ")
    assert printed.err.count("\n") == 1
    assert sentence in printed.err
    assert sorted(places.rglob("*")) == before, "a rejected run leaves no files"


@pytest.mark.parametrize("key", ["run.dir", "data.path", "model.path"])
def test_a_folder_that_must_not_be_read_is_named(key, places, monkeypatch, capsys):
    stat = Path.stat

    def denied(path, **options):
        if "secret" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    more = ["model=hf", "model.vocabulary=300"] if key == "model.path" else []
    assert train.main([f"{key}={places}/secret/here", "parallel=1x1", *more]) == 2
    assert re.fullmatch(rf"recycle_pp: {places}/secret/here\S*: Permission denied\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, " "),
        ({"data.format": "chat", "model.sequence": 512}, " --sequence=512 "),
        ({"data.format": "chat", "data.column": "turns"}, " --sequence=64 --column=turns "),
        ({"data.separator": "<|end|>"}, " --separator='<|end|>' "),
    ],
)
def test_the_command_for_much_text_makes_the_file_that_the_job_reads(changes, options, monkeypatch):
    monkeypatch.setattr("recycle_pp.data.sources.untokenised", lambda settings: 300_000_000)
    settings = Settings().with_values({"data.path": "BIG", "data.tokenizer": "bytes", **changes})
    with pytest.raises(ValueError, match=re.escape(f"TEXT --tokenizer=...{options}--out=FILE.bin")):
        train.prepare_data(settings, 12)


def test_an_error_of_the_file_system_is_reported_to_the_other_nodes(places, monkeypatch):
    told = []

    async def dismiss(launch, address, sentence, **options):
        told.append((sentence, options["code"]))

    monkeypatch.setattr(train, "dismiss", dismiss)
    monkeypatch.setenv("RECYCLE_TOKEN", "x" * 32)
    with pytest.raises(ValueError, match=": File name too long"):
        train.prepare(
            Launch(world=12, local_world=6, master_port=1, agents=2), [f"run.dir={places}/{'x' * 300}", "parallel=3x4"]
        )
    assert [code for _, code in told] == [2]
    assert told[0][0].endswith(": File name too long")


def test_resume_auto_restarts_a_run_that_has_no_checkpoint(tmp_path):
    launch, arguments = Launch(world=12, local_world=12), [f"run.dir={tmp_path / 'run'}"]
    _, killed, *_ = train.prepare(launch, arguments)
    killed.metrics.write_text('{"step": 0}\n')
    killed.unlock()
    with pytest.raises(ValueError, match="contains another run"):
        train.prepare(launch, arguments)
    settings, again, *_ = train.prepare(launch, [*arguments, "run.resume=auto"])
    assert settings.run.resume is False
    assert again.metrics.read_text() == "", "step 0 is repeated"
    again.unlock()


def test_run_steps_beside_run_epochs_is_refused_at_a_start_and_reported_at_a_resume(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("abcdefgh" * 100)
    launch, of_data = Launch(), [f"data.path={tmp_path / 'text.txt'}", "model.sequence=16", "run.validate_every=0"]
    arguments = [f"run.dir={tmp_path / 'run'}", "parallel=1x1", "model=tiny", *of_data]
    unused = r"run\.epochs=0\.5 sets run\.steps; to choose run\.steps, add run\.epochs=null"
    with pytest.raises(ValueError, match=f"^{unused}"):
        train.prepare(launch, [*arguments, "run.epochs=0.5", "run.steps=5000"])
    settings, run, *_ = train.prepare(launch, [*arguments, "run.epochs=0.5"])
    (run.checkpoints / "step-001000").mkdir()
    (run.checkpoints / "step-001000" / ".metadata").touch()
    (run.checkpoints / "step-001000" / "about.json").write_text('{"step": 1000, "files": {".metadata": [0, 0]}}')
    run.unlock()
    again = [arguments[0], "run.resume=true"]
    complete = (
        rf"completed 1000 steps, and run\.epochs=0\.5 gives run\.steps={settings.run.steps}; raise run\.epochs to"
    )
    with pytest.raises(ValueError, match=complete):
        train.prepare(launch, again)
    assert not re.search(unused, capsys.readouterr().out)
    with pytest.raises(ValueError, match=complete):
        train.prepare(launch, [*again, "run.steps=5000"])
    assert re.search(unused, capsys.readouterr().out)
    settings, run, *_ = train.prepare(launch, [*again, "run.steps=5000", "run.epochs=null"])
    run.unlock()
    assert settings.run.steps == 5000


def test_samples_longer_than_the_positions_of_the_model_are_reported_at_the_start(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    model = ["model=hf", f"model.path={tmp_path}", "model.init=random", "model.sequence=65"]
    _, run, *_ = train.prepare(Launch(world=12, local_world=12), [f"run.dir={tmp_path / 'run'}", *model])
    run.unlock()
    assert "model.sequence=65 is longer than the 64 positions" in capsys.readouterr().out


def test_a_resume_in_an_old_folder_also_looks_for_a_newer_run_in_the_store(tmp_path, monkeypatch):
    RunFolder.create(Settings().with_values({"run.dir": str(tmp_path), "checkpoint.store": "s3://bucket/run"})).unlock()
    asked = []
    monkeypatch.setattr(train, "survey", lambda *asked, **how: Survey(step=7))
    monkeypatch.setattr(
        train.subprocess, "run", lambda command, **how: asked.append(command[-2:]) or SimpleNamespace(returncode=0)
    )
    arguments = [f"run.dir={tmp_path}", "run.resume=true"]
    settings, _ = train.continued(compose(arguments), arguments)
    assert asked == [["s3://bucket/run", str(tmp_path)]] and settings.checkpoint.store == "s3://bucket/run"
    asked.clear()
    other = [*arguments, "checkpoint.store=s3://bucket/other"]
    with pytest.raises(ValueError, match=r"s3://bucket/other contains step-000007, of which run.dir=.* has no copy"):
        train.continued(compose(other), other)
    monkeypatch.setattr(train, "survey", lambda *asked, **how: Survey(step=7, copied=True))
    train.continued(compose(other), other)
    assert not asked, "files of a run in another store would replace those of this folder"
    monkeypatch.setattr(train, "survey", None)
    without = [*arguments, "checkpoint.store=null"]
    assert train.continued(compose(without), without)[0].checkpoint.store is None, "the store may no longer exist"


def with_checkpoint(tmp_path, step):
    """The arguments of a run whose checkpoint of `step` steps is in its folder, and not in its store."""
    arguments = ["parallel=3x4", "run.steps=60", f"run.dir={tmp_path}/run", f"checkpoint.store={tmp_path}/store"]
    _, run, *_ = train.prepare(Launch(world=12, local_world=12), arguments)
    run.unlock()
    part = checkpoint.Saver(run.checkpoints).save(step, "0-0", {"model.w": torch.ones(3)}).result()
    checkpoint.finish(run.checkpoints, step, [part], {})
    return [*arguments, "run.resume=auto"]


def test_a_resume_on_several_nodes_first_brings_the_newest_checkpoint_into_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_TOKEN", "x" * 32)
    arguments = with_checkpoint(tmp_path, 40)
    prepared = train.prepare(Launch(world=12, local_world=6, master_port=1, agents=2), arguments)
    prepared.run.unlock()
    assert prepared.done == 40 and survey(f"{tmp_path}/store", 5).step == 40


def test_a_complete_run_whose_last_checkpoint_did_not_reach_the_store_is_started_again_to_upload_it(tmp_path):
    arguments = with_checkpoint(tmp_path, 60)
    prepared = train.prepare(Launch(world=12, local_world=12), arguments)
    assert prepared.complete.startswith("the run is complete") and survey(f"{tmp_path}/store", 5).step == 60


def test_a_resume_on_one_node_does_not_wait_for_an_upload(tmp_path):
    train.prepare(Launch(world=12, local_world=12), with_checkpoint(tmp_path, 40)).run.unlock()
    assert survey(f"{tmp_path}/store", 5).step == 0


def test_settings_are_checked_again_after_automatic_values_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("recycle_pp.fitting.machine.memory_of_a_worker", lambda device: None)
    arguments = [f"run.dir={tmp_path / 'run'}", "parallel.memory=auto", "model.recompute=auto", "model.split=null"]
    with pytest.raises(ValueError, match=r"model\.recompute=auto needs parallel\.memory"):
        train.prepare(Launch(world=12, local_world=12), arguments)
    assert not (tmp_path / "run").exists()


def run_alone(*arguments, cwd, **environment):
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "recycle_pp.train", *arguments],
        env=clean | environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_help_needs_no_torchrun(tmp_path):
    done = run_alone("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: torchrun --nproc-per-node=WORKERS" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_without_a_launcher_a_job_of_many_workers_prints_how_to_launch_it(tmp_path):
    done = run_alone("parallel=2x2", cwd=tmp_path)
    assert done.returncode == 2
    assert all("reads the configuration" in line for line in done.stdout.splitlines()), (
        "only a slow machine prints this status line"
    )
    assert done.stderr == (
        "recycle_pp: parallel.pipelines * parallel.stages = 2 * 2 = 4 workers, but 1 process was launched; "
        "use torchrun --nproc-per-node=4, or change the numbers of pipelines and stages\n"
    )


def test_several_nodes_need_a_token(tmp_path):
    two_nodes = {"RANK": "0", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "6", "MASTER_ADDR": "node0", "MASTER_PORT": "1"}
    done = run_alone(cwd=tmp_path, **two_nodes)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "recycle_pp: a job on several nodes, or with control.address, needs its secret in the environment"
    )


def test_an_address_in_use_is_reported(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_alone("parallel=1x1", f"control.address={address}", cwd=tmp_path, RECYCLE_TOKEN="x" * 32)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "recycle_pp: control.address must be HOST:PORT of rank 0's node with a free port; 127"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.torchrun
def test_torchrun_reports_a_mistake_once(tmp_path):
    torchrun = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node=4", "-m", "recycle_pp.train"]
    done = subprocess.run(
        [*torchrun, "parallel=2x3"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    sentences = [line for line in done.stderr.splitlines() if line.startswith("recycle_pp: ")]
    assert len(sentences) == 1
    assert "exitcode  : 2" in done.stderr
    assert list(tmp_path.iterdir()) == []
