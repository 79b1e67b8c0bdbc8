#!/bin/sh
# Run this script on every node of a job, and again on a node that comes back. It starts the job together with the
# other nodes, resumes it, or joins it while it runs:
#
#   NODES=3 NODE_RANK=0 WORKERS=4 MASTER=host0 RUN_DIR=/shared/runs/mine RECYCLE_TOKEN=... sh node.sh model=gpt124m
#
# NODES          number of nodes; each node runs one pipeline
# NODE_RANK      number of this node, from 0
# WORKERS        processes on each node; each runs one stage, on its own GPU
# MASTER         host name or address of node 0
# RUN_DIR        run folder, on a file system that all nodes share
# RECYCLE_TOKEN  the job's secret, the same on all nodes
# EXTEND         1: also start a finished run again, with a larger run.steps
set -eu

state=$(python -m recycle_pp.status "$RUN_DIR" --json 2>/dev/null | sed -n 's/.*"state": "\([a-z]*\)".*/\1/p') || true
if [ "$state" = finished ] && [ "${EXTEND:-0}" != 1 ]; then # a node that comes back too late must not wait for the others
    echo "the run in $RUN_DIR is finished; EXTEND=1 starts it again"
    exit 0
fi
if [ "$state" = running ]; then
    # --local-addr: torchrun's own store; a container's host name may have no address
    exec torchrun --local-addr=127.0.0.1 --nproc-per-node="$WORKERS" -m recycle_pp.train +join="$RUN_DIR"
fi
exec torchrun --nnodes="$NODES" --node-rank="$NODE_RANK" --nproc-per-node="$WORKERS" \
    --master-addr="$MASTER" --master-port="${MASTER_PORT:-29500}" \
    -m recycle_pp.train control=cluster parallel.pipelines="$NODES" parallel.stages="$WORKERS" \
    run.dir="$RUN_DIR" run.resume=auto "$@"
