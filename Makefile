# Every target sets up what it needs: a virtual environment in .venv, at the versions of constraints.txt.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TEST_SOURCES := pyproject.toml constraints.txt

.PHONY: help demo test test-servers lint docs bench clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	touch $@

$(VENV)/demo-installed: $(VENV)/created $(TEST_SOURCES)
	$(PIP_INSTALL) "torch==2.13.0"
	$(PIP_INSTALL) -e ".[demo]"
	touch $@

$(VENV)/test-installed: $(VENV)/demo-installed
	$(PIP_INSTALL) -e ".[test,lint]"
	touch $@

demo: $(VENV)/demo-installed  ## Train a tiny agent, record it, query it, upload it
	$(BIN)/localtrace demo localtrace-demo

test: $(VENV)/test-installed  ## Run the tests
	$(BIN)/python -m pytest

test-servers: $(VENV)/test-installed  ## Run the tests against a real MLflow server
	$(BIN)/python -m pytest tests/servers

lint: $(VENV)/test-installed  ## Check style, types, layers and the generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.contracts.generated_docs --check

docs: $(VENV)/test-installed  ## Write the generated parts of the docs anew
	$(BIN)/python -m tests.contracts.generated_docs

bench: $(VENV)/test-installed  ## Compare speed and size with what one would use instead
	$(BIN)/python -m tests.benchmarks

clean:  ## Remove the environment and the demo's files
	rm -rf $(VENV) localtrace-demo
