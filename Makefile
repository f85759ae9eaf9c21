# make demo    install into .venv, then train the same model with dense AdamW and with OnebitAdam, and compare
# make bench   install, DeepSpeed into .venv-deepspeed, then time the collective, and steps of every method
# make test    install, then run the usual tests (about ten minutes on two cores)
#      test-fast   those without processes, network and patience (a minute and a half)
#      test-all    all of them (half an hour to fifty minutes, by the machine)
#      test-matrix the fast ones with the oldest, pinned and newest torch, and every Python found (5 GB each)
# make lint    install, then ruff, mypy, and the length of commit subjects
# make docs    install mkdocs, then build the site into site/; a link that leads nowhere is an error
#
# Needs Python 3.10 or later with venv, make and a C++ compiler. ARGS goes to the command: make demo ARGS=--quick

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt
INSTALLED := .venv/.installed
ARGS ?=
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

unexport PYTHONDONTWRITEBYTECODE  # some images set it: each process would compile what it imports anew

.DEFAULT_GOAL := help
.PHONY: help demo bench test test-fast test-all test-matrix lint docs clean

help:
	@sed -n 's/^# //p' Makefile

demo: $(INSTALLED)
	$(BIN)/python scripts/demo.py $(ARGS)

bench: $(INSTALLED)
	-$(BIN)/python scripts/bench.py peer_deepspeed
	$(BIN)/python scripts/bench.py collective
	$(BIN)/python scripts/bench.py time_to_loss seconds --results runs/seconds.jsonl --rates 100mbit 1gbit --budget 20 $(ARGS)

test: $(INSTALLED)
	$(PYTEST) --tier usual --numprocesses 3 $(ARGS)

test-fast: $(INSTALLED)
	$(PYTEST) --tier fast $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) --tier all --numprocesses 3 --durations 40 --durations-min 5 $(ARGS)

test-matrix: $(INSTALLED)
	$(BIN)/python scripts/matrix.py $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p onebit
	@git log --format=%s d6719c2.. | awk 'length > 72 { print "subject over 72 characters: " $$0; bad = 1 } END { exit bad }'

docs: $(INSTALLED)
	@$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(INSTALLED): pyproject.toml setup.py $(wildcard .ci/*.txt) $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "$(PYTHON) is too old: needs 3.10"; exit 1; }
	@test -x $(BIN)/python || { echo "Making .venv ..."; $(PYTHON) -m venv .venv; }
	@echo "Installing into .venv: torch, then the rest (minutes on the first run) ..."
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[dev]'
	@$(PIP) --no-deps --requirement .ci/torchtitan.txt
	@touch $@

clean:
	rm -rf runs build site onebit.egg-info .pytest_cache .mypy_cache .ruff_cache
