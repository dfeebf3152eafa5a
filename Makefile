# Everything runs in .venv. torch is pinned and installed first: a bare `torch` would bring CUDA's
# packages along.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test check soak docs pages browser format clean

help:
	@echo "make setup | demo | test | check | docs | pages | browser | soak | format | clean"

setup: $(VENV)/.setup

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) -e '.[cli]'
	@touch $@

$(VENV)/.setup: $(VENV)/.base
	$(PIP) -e '.[cli,hf,lightning,bench,docs]'
	$(PIP) pytest pytest-xdist hypothesis peft trl pytorch-lightning tensorboard bitsandbytes selenium ruff mypy
	@touch $@

demo: $(VENV)/.base
	$(BIN)/mimose demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Thousands of faults, then tens of thousands of steps.
soak: setup
	$(BIN)/python tests/faults/soak.py

docs: setup
	$(BIN)/mkdocs build --strict

# Tables, figures and paragraphs from the newest raw results, how old these are, and which sentences
# in docs/ do not say what they say.
RESULTS := benchmarks/results
pages: setup
	$(BIN)/python benchmarks/convergence.py --figures
	$(BIN)/python benchmarks/tables.py
	$(foreach file,$(wildcard $(RESULTS)/*-same_graph.json),$(BIN)/python benchmarks/field_page.py $(file);)
	$(BIN)/mimose bench $$($(BIN)/python benchmarks/raw_files.py bench) \
		-o $(RESULTS)/bench --into BENCHMARKS.md > /dev/null
	$(BIN)/python benchmarks/pages.py
	$(BIN)/python benchmarks/claims.py | grep 'NOT MADE' || true

# For the tests of the report page; where it is missing, they are skipped.
browser:
	command -v chromium chromedriver || apt-get install -y -qq chromium chromium-driver

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
