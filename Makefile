# Everything runs in .venv. torch is pinned and installed first: a bare `torch` would bring CUDA's
# packages along.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test check format clean

setup: $(VENV)/.setup

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e .
	@touch $@

$(VENV)/.setup: $(VENV)/.base
	$(PIP) pytest hypothesis transformers peft ruff mypy
	@touch $@

demo: $(VENV)/.base
	$(BIN)/python -m mimose.demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
