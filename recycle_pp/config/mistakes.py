"""The error that a worker raises for a mistake that only the user can correct. The job prints the error's message and
ends instead of restarting the worker.

    raise UserMistake("data.path: text.bin contains token 700; model.vocabulary must be at least 701, but it is 256")
"""

from __future__ import annotations


class UserMistake(ValueError):
    """A request that no worker can fulfil. The text is one sentence that states what is wrong and which
    values are allowed."""
