"""The assignment of workers to processes.

    assignment: Assignment = {0: Worker(0, 0), 3: Worker(1, 1)}         # process 3 plays worker 1.1

A member is a launched process, known by its number. A worker W(d,s) is a role: stage s of pipeline d. A member plays a
worker if its process runs the actions that the plan has for this worker. Processes hold state, vote and have
connections, so messages name members. Plans name workers.
"""

from __future__ import annotations

from recycle_schedules import Worker

Member = int
"""The number of a launched process, which is its rank."""

Assignment = dict[Member, Worker]
"""member -> the worker that it plays; no two members play the same worker."""
