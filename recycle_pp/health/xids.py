"""NVIDIA's catalogue of XIDs, the driver's error codes.

    xid = of(79)        # Xid(79, "RESTART_BM", "GPU has fallen off the bus")
    xid.drains          # whether the GPU needs a reset, a reboot or a repair before further use

`xid_catalog.csv` contains the rows, and names their source.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

OFF_THE_BUS = 79
_DRAINS = ("RESET_GPU", "RESTART_BM", "RESTART_VM", "CHECK_MECHANICALS", "WORKFLOW_XID_48", "WORKFLOW_NVLINK")


class Xid(NamedTuple):
    """A row of the catalogue.

    bucket   immediate action that NVIDIA recommends; "" if the catalogue has none
    meaning  NVIDIA's description; "" if the catalogue lacks the code
    """

    code: int
    bucket: str = ""
    meaning: str = ""

    @property
    def drains(self) -> bool:
        return self.bucket.startswith(_DRAINS)

    def text(self) -> str:
        """The XID in words: "XID 79 (GPU has fallen off the bus; NVIDIA: RESTART_BM)"."""
        about = "; ".join([self.meaning] * bool(self.meaning) + [f"NVIDIA: {self.bucket}"] * bool(self.bucket))
        return f"XID {self.code}" + (f" ({about})" if about else ", which is not in NVIDIA's catalogue")


def of(code: int) -> Xid:
    """The row of the catalogue for this code."""
    return _catalog().get(code, Xid(code))


@cache
def _catalog() -> dict[int, Xid]:
    text = (files(__package__) / "xid_catalog.csv").read_text()
    rows = (line.split(",", 2) for line in text.splitlines() if not line.startswith("#"))
    return {int(code): Xid(int(code), bucket, meaning) for code, bucket, meaning in rows}
