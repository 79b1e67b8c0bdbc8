"""A run's metrics and events, passed on to other tools. Each tool has a process of its own, which reads the run folder:
nothing here can end or slow the job.

    python -m recycle_pp.telemetry.exporters RUN_DIR tensorboard        # also of a run that has ended
    python -m recycle_pp.telemetry.exporters RUN_DIR prometheus 9464
    exporters = Exporters(settings, run)                                # what the coordinator does
    exporters.close()

An exporter is a class with step(record of metrics.jsonl), event(record of events.jsonl) and close(): tensorboard.py,
wandb.py, prometheus.py, command.py. `follower.py` runs it until the job is over.
"""
