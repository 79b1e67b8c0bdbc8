"""Cost of starting a large model on a worker: the dry run of a transformers 70B Llama, without its weights.

    python bench/dry_run.py [--sequence 4096]

Every worker does this run on fake tensors once at its start. Prints its CPU seconds, and the peak memory of the process
including torch and transformers.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time

from recycle_pp.config.settings import Model, Parallel, Settings
from recycle_pp.data.batches import blank
from recycle_pp.model.general.dry_run import dry_run
from recycle_pp.model.general.source import source_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=4096)
    arguments = parser.parse_args()
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, max_position_embeddings=arguments.sequence, tie_word_embeddings=False,
        ).save_pretrained(folder)  # fmt: skip
        model = Model(
            kind="hf", path=folder, init="random", layers=None, sequence=arguments.sequence, vocabulary=128256
        )
        settings = Settings(model=model, parallel=Parallel(stages=8, microbatch_size=1))
        begun = time.process_time()
        outline = dry_run(source_of(settings), blank(settings))
        seconds = time.process_time() - begun
    parameters = sum(shape.numel() for shape in outline.shapes.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    what = f"{parameters / 1e9:.1f} billion parameters, {len(outline.layers)} layers"
    print(f"{what}: {seconds:.1f} s of CPU, {peak:.0f} MiB")


if __name__ == "__main__":
    main()
