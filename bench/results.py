"""Writes the results of a script: `save("links.json", rows)` writes bench/out/links.json."""

import json
from pathlib import Path
from typing import Any


def save(name: str, content: Any) -> None:
    out = Path(__file__).resolve().parent / "out"
    out.mkdir(exist_ok=True)
    (out / name).write_text(json.dumps(content, indent=1) + "\n")
