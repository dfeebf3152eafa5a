# Everything runs in .venv. torch is pinned and installed first: a bare `torch` would bring CUDA's
# packages along.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test check soak docs pages browser format clean

help:
	@echo "make demo | test | check | docs | soak | format | clean"

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

# Tables and figures from the raw results, and which sentences do not say what these say.
RESULTS := benchmarks/results
REPORTED := $(addprefix $(RESULTS)/2026-11-16-h200-bench,.jsonl -scale8.jsonl -quick.jsonl -t5.jsonl \
	-compiled.jsonl) $(foreach part,paper_budgets vision detector fragments,\
	$(wildcard $(RESULTS)/*-h200-bench-$(part).jsonl))
pages: setup
	$(BIN)/python benchmarks/tables.py $(RESULTS)/*.json > $(RESULTS)/README.md
	$(foreach file,$(wildcard $(RESULTS)/*-same_graph.json),$(BIN)/python benchmarks/field_page.py $(file);)
	$(BIN)/mimose bench $(REPORTED:%=--report %) \
		-o $(RESULTS)/bench --into BENCHMARKS.md
	$(BIN)/python benchmarks/claims.py | grep 'NOT MADE' || true

# For the tests of the report page; where it is missing, they are skipped.
browser:
	command -v chromium chromedriver || apt-get install -y -qq chromium chromium-driver

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
