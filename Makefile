# Two commands do everything: `make demo` trains a small model with our attention, `make test` checks the library.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
CONSTRAINT ?= jax
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PYTEST ?= -n 2

.PHONY: install demo test lint types bench sass gpu-test clean

demo: $(READY)
	$(BIN)/python -m examples.train_lm

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)
	$(BIN)/python -m benchmarks run --workloads smoke

# Registers and spills of every kernel, without a GPU; make VENV=.venv-sass EXTRAS=sass sass
sass: $(READY)
	$(BIN)/python -m benchmarks sass --strict benchmarks/results/sass.json

# On the GPU machine: its own python3, nothing installed.
gpu-test:
	$(PYTHON) -m tests.gpu_record

install: $(READY)

# CONSTRAINT holds a version down (CONSTRAINT='jax==0.10.2'); with an NVIDIA GPU use EXTRAS=dev,cuda13.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(CONSTRAINT)' -e '.[$(EXTRAS)]'
	touch $(READY)

clean:
	rm -rf $(VENV)
