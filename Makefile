# make demo    quantize a small real model on this CPU and write a report; needs Python 3.10+, git and make
# make test    the tests that take seconds; make test MARK= runs the slow ones too
# make gate    every GPU kernel compiled for every target, and its machine code looked at; make test takes three of the
#              targets, make test MARK= all
# make check   linter, formatter, type checker
# make clean   remove the environment and what the demo wrote

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RECIPE ?= recipes/smollm2-135m-awq.yaml
MARK   ?= not slow
PYTEST ?=

PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt

# No model hub is needed, and spinning threads stall each other on a shared machine.
export HF_HUB_OFFLINE ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test gate check format clean
.DEFAULT_GOAL := test

# Stamps: an environment is installed once, and again when what it holds changes.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/runtime.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (a minute or two)"
	$(PIP) -e .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) with the tools of development (a minute or two)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/runtime.stamp

# The last line that it prints names the report.
demo: $(VENV)/runtime.stamp
	$(BIN)/compress run $(RECIPE)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "$(MARK)" $(PYTEST)
	$(if $(filter Linux,$(shell uname -s)),$(BIN)/python -m compress.kernels.gate $(if $(MARK),--few))

gate: $(VENV)/dev.stamp
	$(BIN)/python -m compress.kernels.gate

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out build dist *.egg-info
