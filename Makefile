# `make demo` trains, exports and compares; `make test` runs every check. Both build .venv first.
# `make test-engine` runs real SGLang on this CPU, each release in a venv of its own (tests/engine/README.md).
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENGINE_RELEASES := 0.5.17 0.5.23
SOAK_RELEASE := 0.5.17
SOAK_ROUNDS := 200000
SOAK_TP_ROUNDS := 50000
export OMP_NUM_THREADS := 1
export NUMBA_NUM_THREADS := 1

.PHONY: demo test test-engine test-releases test-real-pair soak soak-tp lint clean

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

# Both releases at once: a test keeps one core busy. Each prints what it has to say at its end.
test-engine: $(VENV)/.installed
	printf '%s\n' $(ENGINE_RELEASES) | xargs -P 2 -I{} sh -c 'log=$$(mktemp); \
	  { venv=$$(PYTHON=$(PYTHON) tests/engine/install.sh {}) && \
	    $$venv/bin/python -m pytest -q --confcutdir=tests/engine tests/engine; } > $$log 2>&1; status=$$?; \
	  echo "SGLang {}:"; cat $$log; rm -f $$log; exit $$status'

# What the plugin relies on in every release since 0.5.14; downloads their wheels.
test-releases:
	PYTHON=$(PYTHON) tests/releases/run.sh

# REAL_PAIR names a folder that holds the real pair (tests/real_pair/README.md).
test-real-pair:
	venv=$$(PYTHON=$(PYTHON) tests/engine/install.sh $(SOAK_RELEASE)) && \
	  $$venv/bin/python -m pytest -q --confcutdir=tests/real_pair tests/real_pair

soak:
	venv=$$(PYTHON=$(PYTHON) tests/engine/install.sh $(SOAK_RELEASE)) && \
	  $$venv/bin/python tests/engine/soak.py --rounds $(SOAK_ROUNDS)

# Two tensor-parallel ranks; `make soak-tp ENGINE_RELEASES=0.5.17` for one release alone.
soak-tp:
	for release in $(ENGINE_RELEASES); do \
	  venv=$$(PYTHON=$(PYTHON) tests/engine/install.sh $$release) && \
	  $$venv/bin/python tests/engine/soak_tp.py --rounds $(SOAK_TP_ROUNDS) || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info
