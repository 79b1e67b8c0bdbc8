"""The golden problems, which are stored next to the repository. golden() returns [] if they are missing."""

import json
from pathlib import Path

SHARED = Path(__file__).parents[2].parent / "shared"


def golden():
    """All golden cases: dicts with name, problem, best, bound, proven_optimal."""
    files = sorted((SHARED / "golden").glob("*.json"))
    return [case for file in files for case in json.loads(file.read_text())]
