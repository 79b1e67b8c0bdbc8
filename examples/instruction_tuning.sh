#!/bin/sh
# Trains a Hugging Face model on conversations, with four workers on this machine. See docs/instruction-tuning.md.
#
#   sh examples/instruction_tuning.sh models/qwen2 chats.jsonl run.dir=runs/chat run.steps=500
#
# The folder has config.json, safetensors, and a tokenizer.json with a chat template. Each line of the .jsonl file has
# messages, or prompt and completion. Further arguments are settings, and override those below. With
# numerics=reproducible the death of a worker changes no bit of the weights.
set -e
folder=$1 chats=$2
shift 2
exec torchrun --nproc-per-node=4 -m recycle_pp.train parallel=2x2 \
    model=hf model.path="$folder" model.sequence=1024 \
    data.format=chat data.path="$chats" data.tokenizer="$folder" \
    optimizer.lr=2e-5 optimizer.min_lr=0 optimizer.warmup=20 optimizer.schedule=linear \
    numerics=reproducible checkpoint.hf_at_end=true "$@"
