# `make demo` trains, exports and compares; `make test` runs every check. Both build .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
export NUMBA_NUM_THREADS := 1

.PHONY: demo test lint clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/draftdial demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -q -n 2 --dist loadgroup

clean:
	rm -rf $(VENV) build dist *.egg-info
