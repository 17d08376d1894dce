# make demo: environment, install, the example job, where to look. make test: the tests. make check: what CI runs.
# make faults: kills, signals, hangs, full disks, races and fuzzed inputs, the slow ones too, with their sums.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARALLEL := -n auto --dist worksteal

.PHONY: setup demo test check faults slow bench clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m fluxbatch job=demo
	@echo "next: source $(BIN)/activate; python -m fluxbatch --help"

test: setup
	$(BIN)/python -m pytest $(PARALLEL)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PARALLEL)

faults: setup
	$(BIN)/python -m pytest -m "faults and not gpu" -p no:cacheprovider

slow: setup
	$(BIN)/python -m pytest -m slow

bench: setup
	$(BIN)/python -m fluxbatch bench host --no-results
	$(BIN)/python -m fluxbatch bench plan_scale --rows 1000000 --no-results

clean:
	rm -rf $(VENV) outputs/demo
