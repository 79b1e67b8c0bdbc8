"""What only the user can mend, found while the job runs: it ends with this sentence, rather than one worker after the
other.

    raise UserMistake("data.path: text.bin holds token 700; model.vocabulary must be at least 701, it is 256")
"""

from __future__ import annotations


class UserMistake(ValueError):
    """What is asked for cannot be done, whoever tries. The text is one sentence that says what, and what is allowed."""
