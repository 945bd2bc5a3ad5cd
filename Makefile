# Every target does what it needs first, and nothing twice: the environment and the model are made once and
# remade when constraints.txt or pyproject.toml change.

STAGE ?= latest
PORT ?= 30000
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp

# The shared suite's engine tests, and the kernels alone.
GPU_TESTS ?= $(addprefix tests/shared/test_, half_precision.py tensor_parallel.py schedules.py greedy.py \
	logits.py cache.py memory.py admission.py prompt_logprob.py token_logprobs.py attention.py) \
	tests/kernels/cases tests/support/test_cuda_graph.py tests/execution/test_cuda_graph_runner.py
GPU_WORKERS ?= 6

.DEFAULT_GOAL := help
.PHONY: help setup model serve tour test check gpu-test bench

help: ## list the targets
	@grep -hE '^[a-z$$().-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12
	@echo "Variables: STAGE=$(STAGE) PORT=$(PORT) PYTHON=$(PYTHON)"

setup: $(STAMP) ## make the virtual environment .venv from constraints.txt

$(STAMP): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Strata needs Python 3.11 or newer: install one, or name it: make PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON); the first time takes some minutes ..."
	@$(PYTHON) -m venv $(VENV) || { echo "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

model: $(STAMP) ## fetch the embedded model and convert it
	@$(BIN)/strata model fetch >/dev/null

serve: model ## start the server of STAGE on PORT
	@exec $(BIN)/strata serve $(STAGE) --port $(PORT)

tour: model ## ask every stage the same question
	@$(BIN)/strata tour

test: model ## run the whole suite
	@$(BIN)/python -m pytest

check: $(STAMP) ## lint, types, fast tests
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

# A GPU host often comes with its own torch: PYTHON=python3 on the command line takes that one as it is.
ifeq ($(origin PYTHON),command line)
gpu-test: GPU_PYTHON := $(PYTHON)
else
gpu-test: GPU_PYTHON := $(BIN)/python
gpu-test: $(VENV)/.cuda-stamp
endif
gpu-test: ## engine tests on a CUDA device, all attention paths (PYTHON=python3: without .venv)
	@$(GPU_PYTHON) -m pytest -m "cuda2 or (cuda and not slow)" -n $(GPU_WORKERS) --dist loadgroup $(GPU_TESTS)

$(VENV)/.cuda-stamp: $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev,cuda]'
	@touch $@

bench: model ## CPU speed against transformers
	@$(BIN)/strata bench
