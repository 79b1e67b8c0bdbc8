# make train    train a small model on 12 workers, kill one, bring it back     make test   everything that CI checks
# make test-all also the tests that take minutes                              make help   every setting of a run

PYTHON ?= python3
BIN := .venv/bin
FAULTS ?= +fail_at=20:1.2 +rejoin_at=40:1.2

# One thread a process: 12 workers share the machine. Your own value stands.
export OMP_NUM_THREADS ?= 1

.PHONY: train help test lint types quick test-all torch-versions

# ARGS="run.steps=100 model=tiny" adds settings, FAULTS= takes the faults away
train: $(BIN)/torchrun
	$(BIN)/torchrun --nproc-per-node=12 -m recycle_pp.train $(FAULTS) $(ARGS)

help: $(BIN)/torchrun
	@$(BIN)/python -m recycle_pp.train --help

test: lint types quick

lint: $(BIN)/torchrun
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(BIN)/torchrun
	$(BIN)/mypy

quick: $(BIN)/torchrun
	$(BIN)/python -m pytest

test-all: $(BIN)/torchrun
	$(BIN)/python -m pytest --full

# every torch that pyproject.toml allows, each in an environment of its own (1 to 5 GB)
torch-versions:
	$(PYTHON) tests/torch_versions.py

# The environment: remade when its requirements change.
$(BIN)/torchrun: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m recycle_schedules.compiled
	@touch $@
