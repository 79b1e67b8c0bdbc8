"""The error for a mistake that only the user can correct, found while the job runs. The job prints the error's sentence
and ends; it does not restart the worker.

    raise UserMistake("data.path: text.bin holds token 700; model.vocabulary must be at least 701, it is 256")
"""

from __future__ import annotations


class UserMistake(ValueError):
    """A request that no worker can fulfil. The text is one sentence: the problem, and the allowed values."""
