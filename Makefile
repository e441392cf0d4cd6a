# Every target sets up what it needs, in .venv. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
WORKDIR ?= runs/quickstart

.PHONY: help quickstart test processes slow lint bench clean

help:
	@echo "make quickstart   learn a task on the embedded data, into $(WORKDIR)"
	@echo "make test         the tests (under 3 minutes on 2 cores)"
	@echo "make processes    the tests that start processes (under 10 minutes)"
	@echo "make slow         the tests on real data, and others that take long"
	@echo "make lint         format and style, as in CI"
	@echo "make bench        costs as multiples of one forward pass"

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

quickstart: .venv/installed
	$(BIN)/python -m memory_vit.main --config=configs/quickstart.py --workdir=$(WORKDIR)

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not processes"

processes: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m processes

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

bench: .venv/installed
	$(BIN)/python -m benchmarks.passes

clean:
	rm -rf .venv runs
