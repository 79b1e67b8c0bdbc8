"""Exports of a run: folders for transformers, complete or absent."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

os.environ["HF_HUB_OFFLINE"] = "1"

from recycle_pp import evaluate, export, generate, train
from recycle_pp.config.settings import Settings
from recycle_pp.data.token_file import Description, write_description
from recycle_pp.state import checkpoint, hf_folder, hf_upload
from recycle_pp.state.checksum import ABOUT, TABLE
from recycle_pp.state.stored import StoredCheckpoints
from recycle_pp.storage.store import Store
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing import reference_trainer as plain
from tests.recycle_pp.data import formats
from tests.recycle_pp.data.chat import chats
from tests.recycle_pp.in_process import small
from tests.recycle_pp.state.test_checkpoint import job, newest, save

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


def settings_of(run_dir, **changes) -> Settings:
    return small(run__dir=str(run_dir), parallel__stages=3, numerics__reproducible=True, **changes)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with a checkpoint of three stages after two steps."""
    run = RunFolder.create(settings_of(tmp_path_factory.mktemp("runs") / "run"))
    save(run.checkpoints, 2, job(3, steps=2))
    return run.path


@pytest.fixture
def run(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "run"))


def own_logits(run: Path) -> torch.Tensor:
    """Logits of the project's Transformer with the weights of the newest checkpoint."""
    model = plain.whole(settings_of(run))
    state = checkpoint.load(newest(run / "checkpoints"))
    model.load_state_dict({name[len("model.") :]: t for name, t in state.items() if name.startswith("model.")})
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    with torch.no_grad():
        model(TOKENS, TOKENS)
        return (seen[0] @ model.head.weight.T).view(*TOKENS.shape, -1)


def loaded(folder: Path):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def test_the_exported_model_gives_the_logits_of_the_projects_transformer(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert export.main([str(run), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 30 tensors of step-000002 in float32\n"
    model = loaded(out)
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, own_logits(run), rtol=1e-5, atol=2e-6)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert not list(tmp_path.glob(".out*"))


def test_weights_in_several_files_have_an_index(run, tmp_path):
    model, _ = hf_folder.of_run(run, None, torch.float32)
    for shard, files in ((20_000, 5), (1, 30)):
        out = tmp_path / str(shard)
        hf_folder.write(model, out, shard)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) == len(list(out.glob("*.safetensors"))) > files - 3
        assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in loaded(out).parameters())
        with torch.no_grad():
            torch.testing.assert_close(loaded(out)(TOKENS).logits, own_logits(run), rtol=1e-5, atol=2e-6)


def test_an_export_to_a_store_has_the_same_files_and_is_loadable_only_as_a_whole(run, tmp_path, monkeypatch):
    model, _ = hf_folder.of_run(run, None, torch.float32)
    out, stored = tmp_path / "out", tmp_path / "stored"
    hf_folder.write(model, out, 20_000)
    (stored / "other").mkdir(parents=True)
    put, done = Store.put_file, []
    for last in range(20):

        def put_file(store, path, file, last=last):
            if len(done) == last:
                raise KeyboardInterrupt
            done.append(path)
            put(store, path, file)

        monkeypatch.setattr(Store, "put_file", put_file)
        try:
            hf_upload.upload(model, str(stored), 20_000)
            break
        except KeyboardInterrupt:
            assert not (stored / "config.json").exists()
            done.clear()
    assert sorted(os.listdir(stored)) == sorted([*os.listdir(out), "other"])
    assert all((stored / name).read_bytes() == (out / name).read_bytes() for name in os.listdir(out))
    with pytest.raises(ValueError, match="already contains a model"):
        hf_upload.upload(model, str(stored))


def test_a_checkpoint_that_is_only_in_the_store_is_exported_and_evaluated(run, tmp_path):
    """As after a run on nodes without a common folder."""
    out, again, whole = tmp_path / "out", tmp_path / "again", run / "checkpoints/step-000002"
    assert export.main([str(run), str(out)]) == 0
    stored, files = StoredCheckpoints(Store(f"{tmp_path}/store")), {}
    for part in whole.glob("stage-*"):
        files |= stored.upload(2, part)
    data = {file: about for file, about in files.items() if file.endswith(".distcp")}
    assert stored.seal(2, json.loads((whole / ABOUT).read_text()), data, whole / TABLE)
    shutil.rmtree(run / "checkpoints")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["checkpoint"]["store"], config["run"]["evaluate"] = f"{tmp_path}/store", "ls $1"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate.main([str(run), "--step", "2"]) == 0
    assert "model.safetensors" in (run / "evaluations/step-000002.log").read_text()
    shutil.rmtree(run / "checkpoints")
    assert export.main([str(run), str(again), "--step", "2"]) == 0
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_common_weights_of_a_run_without_islands_are_refused(run, tmp_path, capsys):
    assert export.main([str(run), str(tmp_path / "out"), "--theta"]) == 2
    assert "has no common weights of islands, because its run had no islands.store" in capsys.readouterr().err


def test_a_chosen_dtype_applies_to_the_files_and_the_model(run, tmp_path):
    assert export.main([str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert loaded(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kind, more", [("qwen3", {"tie_word_embeddings": True}), ("gpt2", {"n_layer": 2, "n_head": 2, "n_embd": 32})]
)
def test_a_model_of_another_folder_keeps_its_names_config_and_tokenizer(run, tmp_path, kind, more):
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes | more))
    source, out = formats.tokenizer(tmp_path / "source"), tmp_path / "out"
    model.config.save_pretrained(source)
    with_path(run, source)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    saver = checkpoint.Saver(run / "checkpoints")
    saver.save(4, 0, state | {f"exp_avg.{name}": torch.zeros(1) for name in state})
    checkpoint.finish(run / "checkpoints", 4, [saver.wait()], {})
    assert export.main([str(run), str(out)]) == 0
    again = dict(loaded(out).named_parameters())
    assert again.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(p, again[name]) for name, p in model.named_parameters())
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    restored, _ = generate.load(hf_folder.of_run(run, None, torch.float32)[0])
    ids = torch.arange(10).view(1, 10)
    with torch.no_grad():
        assert torch.equal(restored(ids).logits, model.eval()(ids).logits)


def folder_biased_to(token: int, run: Path, at: Path) -> Path:
    """A folder whose model, in the checkpoint of step 4 of the run, always prefers the token."""
    source = formats.tokenizer(at)
    sizes = {"vocab_size": 320, "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 64, "eos_token_id": 3}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("gpt2", **sizes))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1)
        model.transformer.wte.weight[token] = 9
    model.config.save_pretrained(source)
    with_path(run, source)
    saver = checkpoint.Saver(run / "checkpoints")
    saver.save(4, 0, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    checkpoint.finish(run / "checkpoints", 4, [saver.wait()], {})
    return source


@pytest.mark.parametrize(
    "token, ends, stops", [(7, [1, 7], True), (7, 7, True), (3, 1, True), (9, 1, True), (8, 1, False)]
)
def test_a_text_ends_with_any_token_that_the_folder_or_the_data_name(run, tmp_path, capsys, token, ends, stops):
    source = folder_biased_to(token, run, tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": formats.END}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    names = {of: name for name, of in json.loads((source / "tokenizer.json").read_text())["model"]["vocab"].items()}
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"] |= {"tokenizer": str(source), "separator": names[9]}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert generate.main([str(run), "--prompt", "def", "--temperature", "0", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "def" + names[token] * (1 if stops else 5) + "\n"


def test_an_export_trained_on_conversations_stops_after_an_answer(run, tmp_path):
    source, config = folder_biased_to(7, run, tmp_path / "source"), yaml.safe_load((run / "config.yaml").read_text())
    (source / "generation_config.json").write_text('{"eos_token_id": 1, "top_k": 5}')
    config["data"] |= {"tokenizer": str(chats.tokenizer(tmp_path / "chat")), "format": "chat"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {"eos_token_id": [1, chats.END], "top_k": 5}


def with_path(run: Path, folder: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] |= {"kind": "hf", "path": str(folder)}
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def test_a_model_of_custom_code_is_written_without_a_config(run, tmp_path, capsys):
    saver = checkpoint.Saver(run / "checkpoints")
    saver.save(4, 0, {"model.blocks.0.weight": torch.ones(3, 4)})
    checkpoint.finish(run / "checkpoints", 4, [saver.wait()], {})
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    assert "without a config.json: the model is your own code" in capsys.readouterr().out
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["blocks.0.weight"], torch.ones(3, 4))
    assert generate.main([str(run), "--prompt", "a"]) == 2
    assert "this model is your own code" in capsys.readouterr().err


def test_a_tokenizer_is_exported_for_bytes(run, tmp_path):
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    everything = "".join(map(chr, range(1, 300))) + "héllo 😀\n\n  x"
    assert tokenizer(everything, add_special_tokens=False).input_ids == list(everything.encode())
    assert tokenizer.decode(list(everything.encode())) == everything
    assert tokenizer("a\0b", add_special_tokens=False).input_ids == [97, 0, 98] and tokenizer.eos_token_id == 0
    assert tokenizer.decode([97, 0], skip_special_tokens=True) == "a"


def test_an_exported_model_ends_a_text_with_the_separator_of_the_data(run, tmp_path):
    folder, config = formats.tokenizer(tmp_path / "tokenizer"), yaml.safe_load((run / "config.yaml").read_text())
    ids = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    of_tokens = {"tokenizer": None, "separator": None, "path": str(tmp_path / "tokens.bin")}
    np.arange(100, dtype="<u2").tofile(tmp_path / "tokens.bin")
    write_description(tmp_path / "tokens.bin", Description("uint16", 100, 1, 256, 5, 0, ""))
    data = [({}, 0), ({"tokenizer": str(folder)}, ids[formats.END]), ({"separator": "a"}, ids["a"]), (of_tokens, 5)]
    for number, (changes, end) in enumerate(data):
        config["data"] |= changes
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        out = tmp_path / str(number)
        assert export.main([str(run), str(out)]) == 0
        found = transformers.AutoConfig.from_pretrained(out)
        assert (found.eos_token_id, found.bos_token_id, found.pad_token_id) == (end, None, None)
        assert loaded(out).generation_config.eos_token_id == end


@pytest.mark.parametrize("bare", [False, True])
def test_the_tokenizer_of_the_data_is_exported(run, tmp_path, bare):
    folder = formats.tokenizer(tmp_path / "tokenizer")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["tokenizer"] = str(folder / "tokenizer.json" if bare else folder)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == formats.END and tokenizer.decode(tokenizer("fox lazy").input_ids) == "fox lazy"


def test_the_newest_or_a_chosen_checkpoint_is_exported(run, tmp_path, capsys):
    save(run / "checkpoints", 4, job(3, steps=4))
    (run / "checkpoints" / "step-000006.tmp").mkdir()  # left by an unfinished save
    assert export.main([str(run), str(tmp_path / "new")]) == 0
    assert "step-000004" in capsys.readouterr().out
    assert export.main([str(run), str(tmp_path / "old"), "--step", "2"]) == 0
    assert "step-000002" in capsys.readouterr().out
    assert export.main([str(run), str(tmp_path / "none"), "--step", "3"]) == 2
    assert f"--step must be one of 2, 4, the checkpoints in {run}, not 3" in capsys.readouterr().err


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(run, tmp_path, capsys):
    newest = save(run / "checkpoints", 4, job(3, steps=4))
    (newest / "about.json").write_text("{}")
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "tensors of step-000002" in printed.out
    assert f"the checkpoint {newest} is damaged: " in printed.err and "trying the previous one" in printed.err
    assert export.main([str(run), str(tmp_path / "asked"), "--step", "4"]) == 2
    assert "is damaged: " in capsys.readouterr().err


def test_if_the_job_deletes_the_checkpoint_during_the_export_the_next_one_is_exported(
    run, tmp_path, monkeypatch, capsys
):
    real, later = hf_folder.damage, job(3, steps=4)

    def prune(path, step):
        if path.name == "step-000002":
            save(run / "checkpoints", 4, later)
            shutil.rmtree(path)
        return real(path, step)

    monkeypatch.setattr(hf_folder, "damage", prune)
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    assert "step-000004" in capsys.readouterr().out


def test_a_failed_export_is_reported_in_one_sentence_and_leaves_no_folder(run, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    RunFolder.create(settings_of(tmp_path / "young"))
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    part = next((damaged / "checkpoints" / "step-000002").glob("stage-1-*/*.distcp"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    before = sorted(tmp_path.iterdir())
    for arguments, sentence in [
        ([tmp_path / "nowhere", tmp_path / "out"], "contains no run"),
        ([tmp_path / "young", tmp_path / "out"], "has no complete checkpoint yet"),
        ([damaged, tmp_path / "out"], "is damaged: "),
        ([run, tmp_path / "there"], "already exists; choose another folder"),
    ]:
        assert export.main([*map(str, arguments)]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and printed.count("\n") == 1 and sentence in printed
    assert sorted(tmp_path.iterdir()) == before


def test_a_write_error_leaves_no_folder_and_a_killed_export_can_be_repeated(run, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hf_folder, "write_weights", fail)
        assert export.main([str(run), str(tmp_path / "out")]) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    program = (
        "import os, sys; from recycle_pp import export; from recycle_pp.state import hf_folder as h; "
        "h.write_weights = lambda *_: os.kill(os.getpid(), 9); export.main(sys.argv[1:])"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(run), str(tmp_path / "out")], check=False)
    assert killed.returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp", "run"]
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_the_folder_can_be_exported_at_the_end_of_a_run(run, monkeypatch):
    settings = settings_of(run, checkpoint__hf_at_end=True, run__steps=2)

    async def supervise(*_):
        return train.Ended(0, settings, RunFolder(run))

    monkeypatch.setattr(train, "supervise", supervise)
    monkeypatch.setattr(train, "prepare", lambda *_: train.Prepared(settings, RunFolder(run)))
    assert train.main([]) == 0
    assert (run / "hf" / "step-000002" / "model.safetensors").is_file()
    assert train.main([]) == 0, "an existing folder for this step is not an error"


@pytest.mark.slow
def test_the_documented_command_fine_tunes_a_folder_on_a_users_text(tmp_path):
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    before, folder = transformers.AutoModelForCausalLM.from_config(config), formats.tokenizer(tmp_path / "folder")
    before.save_pretrained(folder)
    formats.jsonl(tmp_path / "notes.jsonl", [formats.text(100, seed) for seed in range(50)])
    documented = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text().split("```")[1]
    command = documented.replace("\\\n", " ").split("recycle_pp.train")[1].split()
    small = ["parallel=1x1", "parallel.microbatches=2", "model.sequence=32", "run.steps=3", "optimizer.warmup=1"]
    arguments = [text.replace("FOLDER", "folder") for text in command] + [*small, "run.validate_every=0"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    subprocess.run(
        [sys.executable, "-m", "recycle_pp.train", *arguments], cwd=tmp_path, check=True, capture_output=True,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    after = loaded(tmp_path / "runs" / "mine" / "hf" / "step-000003")
    moved = [(p - q).abs().max().item() for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    assert all(0 < most < 1e-3 for most in moved), "all weights have been trained from those of the folder"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "runs" / "mine" / "hf" / "step-000003")
    assert tokenizer.eos_token == formats.END


def test_generation_is_greedy_or_random_with_a_seed(run, capsys):
    def text(*arguments):
        assert generate.main([str(run), "--prompt", "def ", "--max-tokens", "5", *arguments]) == 0
        return capsys.readouterr().out

    assert text("--seed", "1") == text("--seed", "1")
    assert len({text("--seed", str(seed)) for seed in range(3)}) > 1
    assert text("--temperature", "0") == text("--temperature", "0", "--seed", "1") == text("--top-k", "1")
    model, tokenizer = generate.load(hf_folder.of_run(run, None, torch.float32)[0])
    ids = list(b"def ")
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert text("--temperature", "0").rstrip("\n") == tokenizer.decode(ids, skip_special_tokens=True).rstrip("\n")


def test_generation_ends_at_the_trained_length_and_rejects_longer_prompts(run, capsys):
    assert generate.main([str(run), "--prompt", "def ", "--temperature", "0"]) == 0
    assert "(at most 12 tokens, because the model has 16 positions)" in capsys.readouterr().err
    for arguments, sentence in [
        (["--prompt", "x" * 16], "--prompt must have fewer than 16 tokens"),
        (["--prompt", ""], "--prompt must have at least one token"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature must be at least 0, not nan"),
    ]:
        assert generate.main([str(run), *arguments]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and printed.count("\n") == 1 and sentence in printed
