"""Watches the hardware of a rank while the job trains, and decides what a fault means for its worker.

    watch = Watch(local_rank, 10.0, settings.run.device, run.quarantine, report)     # in the supervisor
    watch.start(); watch.look(); watch.close()
    python -m recycle_pp.health                        # checks this machine once
    python -m recycle_pp.health --clear UUID RUN       # lifts a quarantine

`nvml` and `host` read samples, `ladder` turns them into findings, and `watch` does both in a thread. Nothing here
imports torch.
"""
