"""The events of a job, one class each: fields, sentence, whether exporters show it, and its row in docs/run-folder.md.

    recorder.event(Respawned(worker="1.2", respawns=1))
    events = RunReader(run).events()
    for event in events:
        if isinstance(event, DeathDetected): ...

A new event is a class in the file of its subject, and the docstring again as a row of the table in the document (a test
prints the row that is missing). It has nothing else: no list names the classes.
"""
