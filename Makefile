# Needs Python >= 3.11, git and make. `make help` lists what can be asked for.

# A Python >= 3.11 of your choice; if none is named, the first one that works is taken.
PYTHON ?=
# Passed on to pytest, as in: make test PYTEST_ARGS="-k ledger -n 0"
PYTEST_ARGS ?=
# Which sabotages to plant, by words in their names, as in: make mutants MUTANTS="clip keys"
MUTANTS ?=
# Passed on to the paper's experiments, as in: make paper PAPER="--figure adult-10"
PAPER ?=
# Passed on to the tutorials, as in: make tutorials TUTORIALS="--quick hello"
TUTORIALS ?=
# Passed on to the battery of data sets, as in: make bench-battery BATTERY="--sets loans --seeds 20"
BATTERY ?=
# The environment, and how it is filled; `make oldest` replaces both.
VENV ?= .venv
INSTALL ?= pip install --quiet --disable-pip-version-check

RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.installed
# A worker for each core, up to four (tests/conftest.py); tests of a file share what they compile.
PYTEST := $(RUN) pytest -n auto --dist loadfile
# What claims to hold to the last bit is compiled as users do, the rest in haste: tests/conftest.py.
EXACT := $(patsubst %,tests/privacy/test_%.py,clipping exact inverse noise)
SAME := tests/test_client.py::test_one_client_at_a_time_is_the_compiled_round

.DEFAULT_GOAL := help
.PHONY: help setup demo hospitals readme docs tutorials test slow mutants oldest lint types check format bench bench-believe bench-battery paper clean

help: ## print this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create the virtual environment and install all that the rest needs

demo: setup ## fit a private Bayesian logistic regression on Adult over ten clients
	$(RUN) tutorials.demo

hospitals: setup ## run a study over three hospitals that keep their records, each in a process of its own
	$(RUN) tutorials.silos

readme: setup ## measure the numbers of the README, and draw its picture (some minutes)
	$(RUN) benchmarks.readme --seeds 5

docs: setup ## build the site into docs/_build/html; every warning is an error
	rm -rf docs/_build
	$(RUN) sphinx -W --keep-going --nitpicky --quiet -b html docs docs/_build/html

tutorials: setup ## run the tutorials in full and write their pages
	$(RUN) tutorials $(TUTORIALS)

test: setup ## run the test suite, but for the tests marked slow
	$(PYTEST) $(or $(PYTEST_ARGS),$(EXACT:%=--ignore=%) --deselect "$(SAME)[full batches]")
	$(if $(PYTEST_ARGS),,XLA_FLAGS= $(PYTEST) $(EXACT) "$(SAME)[full batches]")

slow: setup ## run the tests marked slow, compiled as users do
	XLA_FLAGS= $(PYTEST) -m slow $(PYTEST_ARGS)

mutants: setup ## break the privacy path line by line, and print what no test noticed
	$(RUN) tests.mutants $(MUTANTS)

# pip cannot choose the oldest versions that are allowed; uv can.
oldest: ## run the test suite with the oldest dependencies that pyproject.toml allows
	$(MAKE) test VENV=.venv-oldest INSTALL='pip install --quiet uv && \
		.venv-oldest/bin/python -m uv pip install --quiet --upgrade --resolution lowest-direct'

lint: setup ## look for mistakes, unformatted code and misspelt words
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) codespell_lib

types: setup ## check the types of the whole package
	$(RUN) mypy

check: lint types test ## lint, types and test

format: setup ## mend what ruff can mend by itself, and format the code
	$(RUN) ruff check --fix
	$(RUN) ruff format

bench: setup ## print the tables of accuracy, likelihood, speed and growth
	$(RUN) benchmarks

bench-believe: setup ## print coverage and width of posteriors in synthetic studies, and on real columns
	$(RUN) benchmarks believe columns groups --seeds 16

bench-battery: setup ## fit public data sets of all kinds of outcomes, and print scores (hours; goes on where it was)
	$(RUN) $(INSTALL) --editable '.[battery]'
	$(RUN) benchmarks.battery run --half all $(BATTERY)
	$(RUN) benchmarks.battery table --half all $(BATTERY)

paper: setup ## run the paper's experiments again, draw its figures and write docs/reproduction.md
	$(RUN) benchmarks.paper $(PAPER)

clean: ## remove caches and all that was built or written, but not the environment
	rm -rf build dist *.egg-info demo-output docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last: a set-up that was interrupted, or whose pyproject.toml has changed
# since, is done again. A name on the PATH need not be a Python that runs (pyenv leaves such
# shims), so each candidate is tried.
$(STAMP): pyproject.toml
	@set -eu; \
	if ! $(VENV)/bin/python -c 'import pip' 2>/dev/null; then \
		python=; \
		for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python); do \
			if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
				>/dev/null 2>&1; then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo 'No Python >= 3.11 with the venv module works here: install one (Debian and' >&2; \
			echo 'Ubuntu: with python3-venv), or name it: make setup PYTHON=/path/to/python' >&2; \
			exit 1; \
		fi; \
		echo "Creating $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv --clear $(VENV); \
	fi
	@echo 'Installing numpyro_dppvi and what it needs into $(VENV) (some minutes the first time)'
	@$(RUN) $(INSTALL) --editable '.[dev,docs,plots]'
	@touch $@
