#!/bin/sh
# sbatch examples/slurm.sh [SETTINGS...]     a job on 4 nodes of 8 GPUs that survives nodes, time limits and preemption
#
#SBATCH --job-name=recycle
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=recycle-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#   the job and its step continue when a node fails
#SBATCH --no-kill
#   each node's torchrun gets SIGTERM 120 s before the time limit; the job then saves a checkpoint and ends
#SBATCH --signal=TERM@120
set -eu

GPUS="${SLURM_GPUS_PER_NODE:-8}"  # also a100:8
export NODES="$SLURM_JOB_NUM_NODES" WORKERS="${GPUS##*:}" RUN_DIR="${RUN_DIR:-$PWD/runs/$SLURM_JOB_ID}"
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RECYCLE_TOKEN=$(openssl rand -hex 32)  # srun passes it to the nodes; it is never printed
NODE_SH="${NODE_SH:-examples/node.sh}"
export MASTER RECYCLE_TOKEN NODE_SH

heartbeat() { cat "$RUN_DIR/heartbeat.json" 2>/dev/null || true; }
before=$(heartbeat)

# --kill-on-bad-exit=0, --wait=0: one torchrun that ends with its node does not end the others
# shellcheck disable=SC2016
srun --no-kill --kill-on-bad-exit=0 --wait=0 sh -c 'NODE_RANK=$SLURM_NODEID exec sh "$NODE_SH" "$@"' sh "$@" && code=0 || code=$?
if [ "$(heartbeat)" = "$before" ]; then # the job never started: the run is complete, or there is a mistake
    exit $((code ? 2 : 0))
fi

state=$(python -m recycle_pp.status "$RUN_DIR" --json | sed -n 's/.*"state": "\([a-z]*\)".*/\1/p') || true
case "$state" in
finished) exit 0 ;;
stopped) # after a signal: continue in another allocation. Otherwise the last line has the reason, and a restart does not help
    grep -Eq '"code": *1(30|43)' "$RUN_DIR/heartbeat.json" || exit 1 ;;
"") exit 2 ;; # the run folder cannot be read
esac
scontrol requeue "$SLURM_JOB_ID"
