"""Makes the machine code, or finds it on disk: python -m recycle_schedules.compiled."""

from . import load

if __name__ == "__main__":
    load()
