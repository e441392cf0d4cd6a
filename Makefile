# Every target sets up what it needs, in .venv. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
# Of Python 3.12 or later, for which there is a newer jax; none on many machines.
NEWEST ?= $(shell .ci/newest-python)
NEWEST_BIN := .venv-newest/bin
LOWEST_BIN := .venv-lowest/bin
# With torch, transformers and timm, against which backbones are checked.
EXCHANGE_BIN := .venv-exchange/bin
# With the compiler for TPUs.
COMPILED_BIN := .venv-compiled/bin
# Such as "--out=FILE --device=v6e"; `make compiled-costs COMPILED=--help`.
COMPILED ?= --out=compiled.json
COMPILED_TESTS ?= not nightly
# What builds the site; it reads the package, and does not import it.
DOCS_BIN := .venv-docs/bin
WORKDIR ?= runs/quickstart

RELEASE_BIN := .venv-release/bin
# Such as "--repository=https://... --full"; `make release RELEASE=--help`.
RELEASE ?=

.PHONY: help quickstart test newest lowest processes slow studies exchange compiled compiled-costs nightly mutants lint notebooks docs bench compare release clean

help:
	@echo "make quickstart   teach a far task by four regimes, into $(WORKDIR) (2 to 4 minutes)"
	@echo "make test         the tests (6 to 8 minutes on 2 cores)"
	@echo "make newest       a tenth of them on Python 3.12 or 3.13, with the newest jax"
	@echo "make lowest       the same with the lowest versions that are allowed"
	@echo "make processes    the tests that start processes (30 minutes)"
	@echo "make slow         the tests on real data, and others that take long"
	@echo "make studies      the tests of studies/ (2 minutes)"
	@echo "make exchange     backbones against transformers and timm, and ONNX (5 minutes, 9 GB)"
	@echo "make compiled     programs compiled for TPUs, without one (2 minutes; Linux on x86-64)"
	@echo "make compiled-costs   what their compiler estimates, as a table (10 minutes)"
	@echo "make nightly      cases that repeat others, 20 kills, studies and mutants (30 minutes)"
	@echo "make mutants      the code broken in some places: is each noticed? (6 minutes)"
	@echo "make lint         format, style, import directions, types, as in CI"
	@echo "make notebooks    the pages of docs/notebooks anew, with their pictures (10 minutes)"
	@echo "make docs         the site, into site/: a link that leads nowhere fails"
	@echo "make bench        costs as multiples of one forward pass"
	@echo "make compare      the same here and in PEFT and vit-pytorch (10 minutes)"
	@echo "make release      wheel and sdist in dist/, tried with each Python (nothing is uploaded)"

# Bytecode is compiled where it is imported, and kept: of most of it nothing is, and
# without it each process that a test starts would compile again, for ten seconds.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
INSTALL := pip install --quiet

# What the quickstart needs; a Python that pip would refuse at the end is refused first.
.venv/installed-train: requirements.txt pyproject.toml
	@$(PYTHON) -c "import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit( \
	  'memory_vit needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: ' % sys.version_info[:2] \
	  + 'add PYTHON=python3.12, or the path of another one')"
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) --editable '.[train]'
	touch $@

.venv/installed: .venv/installed-train
	$(BIN)/$(INSTALL) --editable '.[train,serve,ray,wandb,hf,gcs,test]'
	touch $@

# Without the package itself: they run in the checkout, two of them at a time.
.venv-newest/installed: requirements.txt pyproject.toml
	@test -n "$(NEWEST)" || { echo "no Python 3.12 or 3.13 here: make newest NEWEST=PYTHON"; exit 1; }
	$(NEWEST) -m venv .venv-newest
	$(NEWEST_BIN)/python .ci/requirements core train serve test > .venv-newest/requirements.txt
	$(NEWEST_BIN)/$(INSTALL) --requirement .venv-newest/requirements.txt
	touch $@

.venv-lowest/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	$(LOWEST_BIN)/python .ci/lowest > .venv-lowest/lowest.txt
	$(LOWEST_BIN)/python .ci/requirements core train serve test > .venv-lowest/requirements.txt
	$(LOWEST_BIN)/$(INSTALL) --constraint .venv-lowest/lowest.txt --requirement .venv-lowest/requirements.txt
	touch $@

.venv-exchange/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-exchange
	$(EXCHANGE_BIN)/python .ci/requirements core train serve test exchange > .venv-exchange/requirements.txt
	$(EXCHANGE_BIN)/$(INSTALL) --requirement .venv-exchange/requirements.txt
	$(EXCHANGE_BIN)/$(INSTALL) --no-deps jax2onnx==0.17.1
	touch $@

.venv-compiled/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-compiled
	$(COMPILED_BIN)/python .ci/requirements core train serve test compiled > .venv-compiled/requirements.txt
	$(COMPILED_BIN)/$(INSTALL) --requirement .venv-compiled/requirements.txt
	touch $@

.venv-docs/installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) .ci/requirements docs > .venv-docs/requirements.txt
	$(DOCS_BIN)/$(INSTALL) --requirement .venv-docs/requirements.txt
	touch $@

quickstart: .venv/installed-train
	$(BIN)/memory-vit train --config=quickstart --workdir=$(WORKDIR)

# By test and not by file, or one worker waits long for the other's last file.
test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not processes"

# What other versions of the libraries may break; in one process, as the other of
# the two may run beside it.
VERSIONS := -m "versions and not slow and not processes" $(shell grep -rl 'mark\.versions' tests)

newest: .venv-newest/installed
	$(NEWEST_BIN)/python -m pytest $(VERSIONS)

# Old releases warn of what newer ones have changed.
lowest: .venv-lowest/installed
	$(LOWEST_BIN)/python -m pytest -W ignore::DeprecationWarning $(VERSIONS)

processes: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "processes and not nightly"

# What starts processes is in `make processes`, by file: a cluster is started once.
slow: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not processes and not nightly"

studies: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not nightly" studies/tests

exchange: .venv-exchange/installed
	$(EXCHANGE_BIN)/python -m pytest tests/exchange

# There is no libtpu for other machines.
compiled:
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(MAKE) .venv-compiled/installed && $(COMPILED_BIN)/python -m pytest -m "$(COMPILED_TESTS)" tests/compiled; \
	else echo "make compiled is left out: libtpu is for Linux on x86-64, this is $$(uname -sm)"; fi

compiled-costs: .venv-compiled/installed
	$(COMPILED_BIN)/python -m benchmarks.compiled $(COMPILED)

nightly: mutants studies
	$(MAKE) compiled COMPILED_TESTS=nightly
	$(BIN)/python -m pytest -n 2 --dist worksteal -m nightly tests studies/tests
	KILLS=20 FILE_KILLS=20 $(BIN)/python -m pytest -m processes tests/train/test_interrupted_runs.py -k kill

mutants: .venv/installed
	$(BIN)/python tests/mutants/run.py

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

notebooks: .venv/installed
	$(BIN)/python colab/render.py

# Not --quiet: that would count no warnings, and so let them pass.
docs: .venv-docs/installed
	$(DOCS_BIN)/properdocs build --strict --config-file mkdocs.yml

bench: .venv/installed
	$(BIN)/python -m benchmarks.passes

# What builds and checks archives, and nothing of ours.
.venv-release/installed: Makefile
	$(PYTHON) -m venv .venv-release
	$(RELEASE_BIN)/pip install --quiet 'build>=1.3,<2' 'twine>=6.1,<8' 'cffconvert>=2,<3'
	touch $@

release: .venv-release/installed
	$(RELEASE_BIN)/python -m release $(RELEASE)

compare: .venv-exchange/installed
	$(EXCHANGE_BIN)/python -m benchmarks.comparison

clean:
	rm -rf .venv .venv-newest .venv-lowest .venv-exchange .venv-docs .venv-release .venv-compiled .mypy_cache dist site runs
