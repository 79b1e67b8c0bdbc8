#!/bin/sh
# sbatch examples/islands_slurm.sh NAME s3://BUCKET/PREFIX [SETTINGS...]     one island on 4 nodes of 8 GPUs
#
# Submit it once for each island, with another NAME: on this cluster, or on clusters in other regions. They share only
# the bucket. Export the keys of the bucket before (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION): sbatch passes
# them to the nodes. The same NAME continues the same run, also in a new job.
#
#SBATCH --job-name=island
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=island-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=TERM@120
set -eu
: "${2:?usage: sbatch examples/islands_slurm.sh NAME s3://BUCKET/PREFIX [SETTINGS...]}"
name=$1 store=$2
shift 2
export RUN_DIR="$PWD/runs/$name"
# Settings of the command line come last, so they win.
exec sh "${SLURM_SH:-examples/slurm.sh}" islands.store="$store" islands.name="$name" islands.steps=100 "$@"
