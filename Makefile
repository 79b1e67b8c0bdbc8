PYTHON ?= python3
BIN := .venv/bin
FAULTS ?= +fail_at=20:1.1 +rejoin_at=40:1.1

# Unit tests of the pure parts, without their slowest files. They start no job and train no model.
FAST := tests/schedules tests/test_documentation.py \
  $(addprefix tests/recycle_pp/,protocol wire config consensus telemetry test_words.py test_command.py) \
  $(addprefix --ignore=tests/recycle_pp/,protocol/test_recovery.py protocol/test_sharded_recovery.py) \
  --ignore=tests/recycle_pp/telemetry/test_exporters.py --ignore=tests/schedules/planner

# One thread per process, because all workers share the machine. A value from the environment takes precedence.
export OMP_NUM_THREADS ?= 1
# Without bytecode, every test process would compile the product, and every run of pytest would compile all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := list
.PHONY: list install train help test lint types fast quick test-all torch-versions

list: ## print this list
	@echo 'usage: make TARGET. The first target that needs .venv installs it, which takes minutes and 3 GB or more.'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1@\2/p' Makefile | awk -F@ '{ printf "%-18s%s\n", $$1, $$2 }'

install: $(BIN)/pytest ## create .venv with everything that training and tests need

# ARGS="run.steps=100 model=tiny" adds settings; FAULTS= removes the faults.
train: $(BIN)/pytest ## train a small model on 6 workers; one is killed and comes back
	$(BIN)/torchrun --nproc-per-node=6 -m recycle_pp.train parallel=3x2 $(FAULTS) $(ARGS)

help: $(BIN)/pytest ## print every setting of a run
	@$(BIN)/python -m recycle_pp.train --help

fast: $(BIN)/pytest ## run the unit tests that start no job (a few minutes)
	$(BIN)/python -m pytest $(FAST)

test: $(BIN)/pytest ## run lint, types and quick in parallel, as CI does
	@$(MAKE) --no-print-directory -j3 lint types quick

lint: $(BIN)/pytest ## run ruff and check the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(BIN)/pytest ## run mypy
	$(BIN)/mypy

quick: $(BIN)/pytest ## run all tests except the slow ones
	$(BIN)/python -m pytest

test-all: $(BIN)/pytest ## run all tests with new random examples, and print their seed
	$(BIN)/python -m pytest --full

torch-versions: ## test every torch version that pyproject.toml allows, each in its own environment (1 to 5 GB)
	$(PYTHON) tests/torch_versions.py

# Reinstall the environment when its requirements change. The target is pytest: an environment made by hand may lack it.
$(BIN)/pytest: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --progress-bar on -c constraints.txt -e '.[dev]'
	$(BIN)/python -m recycle_schedules.compiled
	@touch $@
