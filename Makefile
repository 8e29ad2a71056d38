# Everything needs only Python 3.10+ and make: each target sets up what it uses.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OUT ?= studies/laptop
STUDY ?=

.DEFAULT_GOAL := help
.PHONY: help install study test lint browser bench clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(READY)  ## set up .venv, nothing else

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "farfield needs Python 3.10 or newer; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

study: $(READY)  ## the main job: train, evaluate to 128 times the training length, write the page
	$(BIN)/farfield study laptop --out $(OUT) $(STUDY)

test: $(READY)  ## all tests but those that need a browser
	$(BIN)/python -m pytest -n 2 -m 'not browser'

browser: $(READY)  ## the page in a real headless Chromium
	FARFIELD_REQUIRE_BROWSER=1 $(BIN)/python -m pytest -m browser

bench: $(READY)  ## what each mechanism costs, against rope, on this machine
	$(BIN)/farfield bench

lint: $(READY)  ## linter, formatter and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove .venv and caches, keep studies
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
