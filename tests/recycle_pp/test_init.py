"""`recycle init`: a file with every setting, for this machine."""

import pytest

from recycle_pp import init
from recycle_pp.config.checks import validate
from recycle_pp.config.compose import compose
from recycle_pp.config.setting import rules
from recycle_pp.config.settings import Settings
from recycle_pp.fitting.shapes import best, shapes


@pytest.fixture
def machine(monkeypatch):
    """A function that fakes the machine's GPUs (their bytes), cores and memory."""

    def of(gpus=(), cores=4, memory=16e9):
        monkeypatch.setattr(init, "gpus", lambda: list(gpus))
        monkeypatch.setattr(init.os, "sched_getaffinity", lambda _: set(range(cores)))
        monkeypatch.setattr("recycle_pp.fitting.machine.host_memory", lambda: memory)
        monkeypatch.setattr("recycle_pp.fitting.machine.gpus", lambda: list(gpus))

    return of


def test_the_file_can_be_trained_unchanged_and_explains_every_key(machine, tmp_path, capsys):
    machine(cores=4)
    path = tmp_path / "run.yaml"
    assert init.main([str(path), "model=tiny", "optimizer.lr=1e-3"]) == 0
    settings = compose([str(path)])
    validate(settings, 4)
    assert (settings.model, settings.optimizer.lr) == (compose(["model=tiny"]).model, 1e-3)
    assert settings.parallel.memory == "3.6 GB"
    text = path.read_text()
    assert "\n  dir: 'runs/${now:%Y" in text, "each start has a folder of its own"
    comments = " ".join(line.strip().removeprefix("# ") for line in text.splitlines() if line.strip().startswith("#"))
    for key, rule in rules(Settings).items():
        assert f"\n{'  ' * key.count('.')}{key.rpartition('.')[2]}: " in text
        assert rule.text in comments
    assert "after a death" in comments
    assert f"recycle train {path}" in capsys.readouterr().out


def test_there_is_a_worker_for_each_gpu_with_its_memory(machine):
    machine(gpus=[80e9] * 8, cores=64)
    settings, comment = init.fitted(["model=tiny"])
    assert settings.parallel.pipelines * settings.parallel.stages == 8
    assert settings.parallel.memory == "72 GB"
    assert "8 workers on a machine with 8 GPUs, with 72 GB each" in comment[0]


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (3, 3), (64, 8)])
def test_without_gpus_there_is_a_worker_for_each_core_within_limits(machine, cores, workers):
    machine(cores=cores)
    settings, _ = init.fitted(["model=custom", "model.build=a:b", "model.layers=c"])
    assert settings.parallel.pipelines * settings.parallel.stages == workers


def test_the_chosen_shape_survives_a_death_if_such_a_shape_fits():
    settings = compose(["model=bench17m"])
    table = shapes(settings, 4, 16e9, "cuda", None)
    assert [shape.text for shape in table] == ["4x1", "2x2", "1x4"]
    assert best(table).text == "4x1"
    narrow = shapes(settings, 4, 1.05 * table[1].fullest, "cuda", None)
    assert [shape.text for shape in narrow if not shape.fits] == ["4x1"]
    assert best(narrow).text == "2x2"
    nothing = shapes(settings, 4, 1e3, "cuda", None)
    assert best(nothing).fullest == min(shape.fullest for shape in nothing)


def test_shape_memory_and_microbatches_of_the_command_line_are_kept(machine):
    machine()
    settings, comment = init.fitted(["model=tiny", "parallel=1x3", "parallel.memory=2GB"])
    assert (settings.parallel.pipelines, settings.parallel.stages, settings.parallel.memory) == (1, 3, "2GB")
    assert len(comment) == 1
    assert init.fitted(["model=tiny", "parallel.microbatches=7"], 2)[0].parallel.microbatches == 7


@pytest.mark.parametrize("workers", [1, 2, 5, 6])
def test_without_a_known_memory_the_shape_still_has_all_workers(workers, machine):
    machine()
    settings, comment = init.fitted(["model=tiny", "parallel.memory=null"], workers)
    assert settings.parallel.pipelines * settings.parallel.stages == workers
    assert comment[1:] == ["The shapes are not compared, because the memory of a worker is not known."]


def test_a_mistake_is_reported_in_one_sentence_and_writes_nothing(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    for arguments, sentence in (
        ([str(tmp_path / "run")], "the file's name must end with .yaml"),
        ([str(path), "run.stepz=3"], "run.stepz is not a configuration key; did you mean run.steps?"),
        ([str(path), "model=tiny", "--workers=0"], "--workers must be at least 1, not 0"),
    ):
        assert init.main(arguments) == 2
        assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    path.touch()
    assert init.main([str(path)]) == 2
    assert "exists; remove it, or choose a different file" in capsys.readouterr().err
