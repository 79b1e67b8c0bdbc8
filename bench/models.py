"""Cost of the general path: a Llama from transformers, the project's own Transformer, and torch's pipelining.

    python bench/models.py [--layers 4] [--width 256] [--sequence 128] [--steps 5]

Two stages, four micro-batches a step, one thread, random weights of the same shapes, fp32 and bf16.

    general    `model=hf`
    own        the project's Transformer
    torch      the stages of the same transformers module under `torch.distributed.pipelining.Schedule1F1B`, in two
               processes, without separate F, I and W. In bf16 its AdamW updates the rounded weights, without masters

The bench prints medians in milliseconds of CPU time: F, I and W of a micro-batch on the last stage, and a step of both
stages with the optimizer. Memory is MiB at the peak of a step, above the level before the model was built.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import save
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from recycle_pp.config.settings import Model, Numerics, Parallel, Run, Settings
from recycle_pp.linux.processes import memory_of
from recycle_pp.model.stage import Stage
from recycle_pp.model.stage_module import Batch
from recycle_pp.model.transformer import stream_dtype
from recycle_pp.numerics.optimizer import StageOptimizer

CPU = torch.device("cpu")
STAGES, MICROBATCHES, SAMPLES = 2, 4, 2
PATIENCE = 300  # maximum seconds to wait for a process's result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 4), ("width", 256), ("sequence", 128), ("vocabulary", 4096), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':10}{'':8}" + "".join(f"{name:>10}" for name in ("F", "I", "W", "step", "MiB")))
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("fp32", "bf16"):
            for name in ("general", "own", "torch"):
                settings = settings_of(name, precision, Path(folder), arguments)
                row = in_torch(settings) if name == "torch" else children(in_stages, [(settings,)])[0]
                rows.append({"path": name, "precision": precision, **row})
                cells = (row.get(key) for key in ("F", "I", "W", "step", "MiB"))
                print(
                    f"{name:10}{precision:8}" + "".join(f"{'-' if v is None else format(v, '.1f'):>10}" for v in cells)
                )
    save("models.json", rows)


def settings_of(path: str, precision: str, folder: Path, a: argparse.Namespace) -> Settings:
    """Settings with the same shape for each path. Writes a config.json for transformers into `folder`."""
    import transformers

    model = Model(
        layers=a.layers, width=a.width, heads=8, kv_heads=4, ffn=3 * a.width, sequence=a.sequence,
        vocabulary=a.vocabulary,
    )  # fmt: skip
    transformers.LlamaConfig(
        vocab_size=a.vocabulary, hidden_size=a.width, intermediate_size=model.ffn, num_hidden_layers=a.layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=a.sequence, tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    if path != "own":
        model = replace(model, kind="hf", path=str(folder), init="random", layers=None)
    parallel = Parallel(pipelines=1, stages=STAGES, microbatches=MICROBATCHES, microbatch_size=SAMPLES)
    return Settings(model, parallel=parallel, numerics=Numerics(precision=precision), run=Run(steps=a.steps))


def in_stages(settings: Settings) -> dict[str, float]:
    """Both stages in this process, one micro-batch after the other."""
    memory = Memory()
    stages = [Stage(settings, number, CPU) for number in range(STAGES)]
    optimizers = [StageOptimizer(settings, stage) for stage in stages]
    times: dict[str, list[float]] = {"F": [], "I": [], "W": [], "step": []}
    for step in range(settings.run.steps):
        begun = time.process_time()
        for g in range(MICROBATCHES):
            batch = batch_of(settings, step, g)
            taken: list[Tensor] = []
            grads: list[Tensor] = []
            for stage in stages:
                taken = timed(times["F"], stage.forward, step, g, batch, taken)
            for stage in reversed(stages):
                grads = timed(times["I"] if stage.last else [], stage.backward_input, g, grads)
            for stage in stages:
                timed(times["W"], stage.backward_weight, g)
        for stage, optimizer in zip(stages, optimizers, strict=True):
            optimizer.step(stage.gradients.reduced(stage.gradients.payload()), step)
            stage.gradients.clear()
        times["step"].append(1e3 * (time.process_time() - begun))
    for kind in ("F", "W"):
        times[kind] = times[kind][STAGES - 1 :: STAGES]  # keeps only the times of the last stage
    return {kind: statistics.median(of) for kind, of in times.items()} | {"MiB": memory.peak()}


def in_torch(settings: Settings) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    each = children(under_1f1b, [(rank, settings, port) for rank in range(STAGES)])
    return {key: sum(result[key] for result in each) for key in ("step", "MiB")}


def under_1f1b(rank: int, settings: Settings, port: int) -> dict[str, float]:
    memory, last = Memory(), rank == STAGES - 1
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=STAGES)
    part, dtype = Half(settings, rank).to(stream_dtype(settings)), stream_dtype(settings)
    batch = batch_of(settings, 0, 0)
    hidden = torch.empty(*batch.inputs.shape, part.width, dtype=dtype, requires_grad=True)
    logits = torch.empty(*batch.inputs.shape, settings.model.vocabulary, dtype=dtype, requires_grad=True)
    stage = PipelineStage(
        part, rank, STAGES, CPU,
        input_args=(hidden if rank else batch.inputs,), output_args=(logits if last else hidden,),
    )  # fmt: skip

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), target.flatten()) / MICROBATCHES

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    optimizer, steps = torch.optim.AdamW(part.parameters(), fused=True), []
    for step in range(settings.run.steps):
        data = [batch_of(settings, step, g) for g in range(MICROBATCHES)]
        begun = time.process_time()
        if rank == 0:
            schedule.step(torch.cat([batch.inputs for batch in data]))
        else:
            schedule.step(target=torch.cat([batch.labels for batch in data]), losses=[])
        optimizer.step()
        optimizer.zero_grad()
        steps.append(1e3 * (time.process_time() - begun))
    dist.barrier()
    return {"step": statistics.median(steps), "MiB": memory.peak()}


class Half(nn.Module):
    """The layers of one stage of a transformers Llama, called as in its own forward."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__()
        import transformers

        config = transformers.AutoConfig.from_pretrained(str(settings.model.path))
        whole, count = transformers.AutoModelForCausalLM.from_config(config), config.num_hidden_layers // STAGES
        self.width, self.embed = config.hidden_size, whole.model.embed_tokens if rank == 0 else None
        self.layers = whole.model.layers[rank * count : (rank + 1) * count]
        self.rotary, last = whole.model.rotary_emb, rank == STAGES - 1
        self.norm: nn.Module | None = whole.model.norm if last else None
        self.head: nn.Module | None = whole.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        positions = self.rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
        for layer in self.layers:
            x = layer(x, position_embeddings=positions)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def batch_of(settings: Settings, step: int, g: int) -> Batch:
    random = torch.Generator().manual_seed(step * MICROBATCHES + g)
    tokens = torch.randint(settings.model.vocabulary, (SAMPLES, settings.model.sequence + 1), generator=random)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def timed(times: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    begun = time.process_time()
    result = call(*arguments)
    times.append(1e3 * (time.process_time() - begun))
    return result


class Memory:
    """Peak memory of this process, minus its memory at the construction of this object."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size (proc(5))
        self._before = memory_of("VmRSS")

    def peak(self) -> float:
        return (memory_of("VmHWM") - self._before) / 2**20


def children(target: Callable[..., dict[str, float]], arguments: list[tuple[Any, ...]]) -> list[dict[str, float]]:
    """Results of `target` for each of `arguments`, each in its own process, all at once."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    processes = [
        context.Process(target=_child, args=(send, target, given), daemon=True)
        for (_, send), given in zip(pipes, arguments, strict=True)
    ]
    for process, (_, send) in zip(processes, pipes, strict=True):
        process.start()
        send.close()
    try:
        return [receive.recv() for receive, _ in pipes if receive.poll(PATIENCE)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _child(pipe: Any, target: Callable[..., dict[str, float]], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(target(*arguments))


if __name__ == "__main__":
    main()
