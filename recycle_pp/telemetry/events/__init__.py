"""The events of a job, one class each: fields, sentence, whether exporters show it, and its row in docs/run-folder.md.

    recorder.event(Respawned(worker="1.2", respawns=1))
    events = RunReader(run).events()
    for event in events:
        if isinstance(event, DeathDetected): ...

To add an event, add a class to the file of its subject, and repeat its docstring as a row of the table in
docs/run-folder.md (a test prints the missing row). `catalog` finds the classes.
"""
