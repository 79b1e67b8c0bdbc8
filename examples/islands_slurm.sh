#!/bin/sh
# An island as a SLURM job. Run it once on each cluster; the islands meet in S3.
#   sh examples/islands_slurm.sh NAME s3://BUCKET/RUN [SETTINGS...]
# Needs AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, which sbatch passes to the job. All islands must have the
# same model and data. Their numbers of nodes, pipelines and stages may differ.
set -eu
name=$1 store=$2
shift 2
sbatch --job-name="island-$name" examples/slurm.sh \
    islands.store="$store" islands.name="$name" islands.steps=100 islands.parts=16 \
    checkpoint.store="$store/checkpoints/$name" "$@"
