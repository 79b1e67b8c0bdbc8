#!/bin/sh
# Two islands of 2 x 2 workers on one machine, which meet in a folder. Prints the rounds at the end.
#   sh examples/islands.sh [FOLDER [SETTINGS...]]
set -eu
folder=$(mkdir -p "${1:-runs/islands}" && cd "${1:-runs/islands}" && pwd)
[ $# -eq 0 ] || shift
jobs=""
for name in oregon frankfurt; do
    torchrun --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 -m recycle_pp.train \
        model=tiny parallel=2x2 run.steps=60 run.dir="$folder/$name" \
        islands.store="$folder/store" islands.name="$name" islands.steps=10 islands.parts=2 islands.patience=60 \
        "$@" > "$folder/$name.log" 2>&1 &
    jobs="$jobs $!"
done
code=0
for job in $jobs; do
    wait "$job" || code=1 # the reason is in the island's log
done
[ $code -eq 0 ] || exit 1
python -m recycle_pp.islands "$folder/store"
