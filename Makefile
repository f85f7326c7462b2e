# Two commands for a newcomer: `make demo` trains a small model through a swarm on this machine, `make test` checks everything.
# `make fuzz SECONDS=600 SEED=7` looks for bytes that the wire protocol does not survive.
# `make docker-test` builds the container image and runs a swarm of containers.
# All make their own virtual environment (.venv) first; nothing outside this folder is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STEPS ?=
SECONDS ?= 600
SEED ?= 0

.PHONY: cases demo docker-test fuzz test

demo: $(VENV)/installed
	@echo "== Starting a seed and six nodes on this machine; they train a small language model (about 3 minutes; Ctrl-C ends it)."
	@$(BIN)/plnode demo $(if $(STEPS),--steps $(STEPS))

test: $(VENV)/installed
	@echo "== Running all tests (several minutes on two cores)."
	@$(BIN)/python -m pytest

# The cases on the in-memory internet over more seeds than the 20 of `make test`: make cases CASE_SEEDS=1000
cases: $(VENV)/installed
	@CASE_SEEDS=$(or $(CASE_SEEDS),200) $(BIN)/python -m pytest -q tests/wire/sim -k "wire_ or section_23"

docker-test: $(VENV)/installed
	@echo "== Building the image and running containers (needs a Docker engine; without one: docker/engine.sh up; 10 minutes)."
	@$(BIN)/python -m pytest -m container -s tests/docker

fuzz: $(VENV)/installed
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another one with make PYTHON=...") if sys.version_info < (3, 11) else None'
	@echo "== Creating the virtual environment $(VENV) and installing what the project needs (once; PyTorch is large)."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@
