"""Which process plays which worker.

    assignment: Assignment = {0: Worker(0, 0), 3: Worker(1, 1)}         # process 3 plays worker 1.1

A member is a launched process, known by its number. A worker is a role W(d,s). Processes hold state, vote and have
connections, so these messages name members. Plans name workers.
"""

from __future__ import annotations

from recycle_schedules import Worker

Member = int
Assignment = dict[Member, Worker]
