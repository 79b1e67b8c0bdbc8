"""A job on containers of one GPU each, on Modal: every container is a node with its own torchrun.

    modal secret create recycle RECYCLE_TOKEN=$(openssl rand -hex 32)
    modal run examples/modal_containers.py

NOT TRIED: this file has never run on Modal. Only the script that it starts in a container (`node.sh`) is tested. It
assumes i6pn, the private IPv6 network between containers of one region. Containers find each other through a
`modal.Dict`. They have names in /etc/hosts, because `control.address` must be a name or IPv4.

The containers share no file system, because a Volume shows the files of others only after commit and reload. So no
checkpoint is complete, and a returning container finds no job to join. The job survives deaths as long as a worker of
each stage lives.
"""

import os
import socket
import subprocess
import time

import modal

PIPELINES, STAGES = 3, 4
NODES = PIPELINES * STAGES
SETTINGS = ["model=gpt124m", f"parallel.pipelines={PIPELINES}", f"parallel.stages={STAGES}"]

app = modal.App("recycle")
image = modal.Image.debian_slim(python_version="3.12")
image = image.add_local_dir(".", "/recycle_pp", copy=True, ignore=[".venv", ".git", "runs"])
image = image.run_commands("pip install -c /recycle_pp/constraints.txt /recycle_pp")
image = image.add_local_file("examples/node.sh", "/node.sh")
secret = modal.Secret.from_name("recycle")


@app.function(gpu="H100", image=image, i6pn=True, region="us-east", timeout=24 * 3600, secrets=[secret])
def container(rank: int, addresses: modal.Dict) -> None:
    """One node."""
    addresses[rank] = socket.getaddrinfo("i6pn.modal.local", None, socket.AF_INET6)[0][4][0]
    while len(known := dict(addresses.items())) < NODES:
        time.sleep(1.0)
    with open("/etc/hosts", "a") as hosts:
        hosts.writelines(f"{known[k]} node{k}\n" for k in range(NODES))
    subprocess.run(["sh", "/node.sh", *SETTINGS], env=os.environ | environment(rank), check=True)


def environment(rank: int) -> dict[str, str]:
    """Environment of node.sh."""
    return {"NODES": f"{NODES}", "NODE_RANK": f"{rank}", "WORKERS": "1", "MASTER": "node0", "RUN_DIR": "/tmp/run"}


@app.local_entrypoint()
def main() -> None:
    with modal.Dict.ephemeral() as addresses:
        list(container.starmap((rank, addresses) for rank in range(NODES)))
