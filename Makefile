# Everything runs from .venv, which `make setup` makes, or completes if it is there already.
#
#   make check   format, lint, types and the quick tests: under two minutes, for before every commit
#   make test    the same lint and every test, real multi-process jobs included: what CI runs
#   make demo    a training job that loses a machine and goes on from memory
#   make bench   speed, as ratios to a memcpy (BENCH_ARGS="--json results.json" keeps the numbers)

PYTHON ?= python3
# The torch that this repository is tested with. Another build: make setup TORCH="torch==2.6.0"
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.setup-stamp

# Most tests wait for processes more than they compute. A file's tests stay together, in their order.
TWO_AT_A_TIME ?= -n 2 --dist loadfile

.PHONY: setup lint format check test demo bench clean distclean

setup: $(STAMP)

# Build isolation is off so that a second run needs nothing from the network.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit("Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	$(BIN)/python -m pip install -q "setuptools>=77" "$(TORCH)"
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[pytorch,dev]"
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint
	$(BIN)/pytest $(TWO_AT_A_TIME) -m "not slow and not e2e and not cuda" $(PYTEST_ARGS)

test: lint
	$(BIN)/pytest $(TWO_AT_A_TIME) $(PYTEST_ARGS)

demo: setup
	$(BIN)/flashpoint demo $(DEMO_ARGS)

bench: setup
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
