"""Compiles the loops, or loads them from the disk cache: python -m recycle_schedules.compiled."""

from . import load

if __name__ == "__main__":
    load()
