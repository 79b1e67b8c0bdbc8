"""Sends a run's metrics and events to other tools. Each exporter is a separate process that reads the run folder, so
errors and delays of exporters do not affect the job.

    python -m recycle_pp.telemetry.exporters RUN_DIR tensorboard        # even for a run that has ended
    python -m recycle_pp.telemetry.exporters RUN_DIR prometheus 9464
    exporters = Exporters(settings, run)                                # in the coordinator
    exporters.close()

An exporter is a class with step(record of metrics.jsonl), event(record of events.jsonl) and close(): tensorboard.py,
wandb.py, prometheus.py, command.py. `__main__.py` runs it until the job is over.
"""
