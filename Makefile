# Everything runs from .venv, which `make setup` makes, or completes if it is there already.
#
#   make check   format, lint, types and the quick tests: under two minutes, for before every commit
#   make test    the same lint and every test, real multi-process jobs included: what CI runs
#   make test-units, make test-jobs   two parts of `make test`, which run beside each other and beside the next three
#   make test-nemo   likewise: what needs NeMo, in .venv-nemo, which it makes (3 GB, some minutes)
#   make test-megatron   likewise: what needs megatron-core, with the newest release that is supported, in .venv-megatron,
#                which it makes (5 GB, a minute or two); says so, and is done, where there is no Python 3.12
#   make test-trainers   likewise: what needs torchtitan and DeepSpeed, in .venv-trainers, which it makes on top of .venv (a minute)
#   make test-bridge   what of Megatron-Bridge runs without a GPU, in .venv-bridge, which it makes on top of .venv-megatron (750 MB)
#   make soak    the long campaigns that `make test` only samples: random faults, random states, every combination of
#                parameters, more seeds; and its jobs again with every process started cold, where `make test` forks most
#                of them; and what needs megatron-core with each release that is supported. Before each release: it takes hours
#   make matrix  the quick tests with other releases of Python and torch, each pair in an environment of its own: hours
#                (MATRIX_ARGS="--python 3.12 --torch 2.6 tests/engine" for a part); writes docs/compatibility.md
#   make demo    a training job that loses a machine and goes on from memory
#   make bench   speed, as ratios to a memcpy (BENCH_ARGS="--json results.json" keeps the numbers)
#   make bench-peers   others' packages beside ours, each in an environment of its own in build/bench-peers, which it makes
#                (4 GB, some minutes): writes build/bench-peers/results.json, and plots into docs/
#   make docs    the pages of docs/ as a site in build/site; tests build it as strictly, elsewhere
#   make test-cuda, make bench-cuda   on a machine with a GPU: from the tree as it is, with .venv or else with the python3
#                there is, and without a network (CUDA_PYTHON=...). Elsewhere they say so, and are done

PYTHON ?= python3
# The torch that this repository is tested with. Another build: make setup TORCH="torch==2.6.0"
TORCH ?= torch==2.13.0
# Likewise. None at all: make setup MEGATRON=
MEGATRON ?= megatron-core==0.16.1
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
MATRIX_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.setup-stamp

# Containers often forbid it, and then every process compiles all that it imports, and each worker every test, anew.
export PYTHONDONTWRITEBYTECODE :=

# Most tests wait for processes more than they compute: two cores take three at a time. A file's tests stay together, in
# their order. Each worker has a network of its own, with loopback only, where it may (as root; see tests/conftest.py): in
# `make check` and the unit tests too, though only jobs need it. With PYTEST_ARGS="-n 0" there are no workers, and tests
# run in the machine's network. A worker that a test has killed is not replaced: that would run the test again, and then
# wait for ever. Files come as tests/conftest.py puts them, those with slow tests first, and not those with many tests.
BY_FILE := --dist loadfile --no-loadscope-reorder --max-worker-restart=0
SEVERAL_AT_A_TIME ?= -n 3 $(BY_FILE)

# Where CI is set, tests that failed run once more, alone, and both results are printed. One that passes then has raced,
# which is a defect of the test: mend it. Elsewhere a failure is a failure. A cache for each run, since runs are beside
# each other. $(call pytest,PYTHON,NAME,ARGUMENTS)
RETRY_FAILED ?= $(CI)
define pytest
$(1) -m pytest -o cache_dir=.pytest_cache/$(2) $(3) || { code=$$?; test $$code = 1 && test -n "$(RETRY_FAILED)" && \
	    echo "==== failed beside others; once more, alone ====" && \
	    $(1) -m pytest -o cache_dir=.pytest_cache/$(2) --last-failed --last-failed-no-failures=none $(3) -n 0; }
endef

.PHONY: setup lint format check test test-jobs test-units test-nemo test-megatron test-trainers test-bridge soak soak-megatron matrix demo bench bench-peers docs test-cuda bench-cuda clean distclean

setup: $(STAMP)

# Build isolation is off so that a second run needs nothing from the network.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit("Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	$(BIN)/python -m pip install -q "setuptools>=77" "$(TORCH)" $(MEGATRON)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[pytorch,dev]"
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint
	$(BIN)/pytest $(SEVERAL_AT_A_TIME) --ignore=tests/e2e -m "not slow and not cuda and not soak" $(PYTEST_ARGS)

# Jobs run several at a time, and beside others, where each worker may have a network of its own (as root): torchrun
# chooses the port of a job seconds before the job listens there, and another job's many gloo groups, which listen at any
# port that is free, would sooner or later be at that one. In other environments, each worker takes half a minute to import
# what is tested there, so there are fewer.
HAS_NETWORKS = $(BIN)/python -m tests.support.own_network
JOBS_AT_A_TIME ?= $$($(HAS_NETWORKS) && echo "$(SEVERAL_AT_A_TIME)")
FEWER_AT_A_TIME ?= $$($(HAS_NETWORKS) && echo "-n 2 $(BY_FILE)")

test: lint
	$(MAKE) -j$$($(HAS_NETWORKS) && echo 2 || echo 1) test-jobs test-units test-nemo test-megatron test-trainers

test-jobs: setup
	$(call pytest,$(BIN)/python,jobs,$(JOBS_AT_A_TIME) -m "not soak" tests/e2e $(PYTEST_ARGS))

# What test-megatron has is left out where that can be done: with the megatron-core here are its jobs and its conformance.
test-units: setup
	$(call pytest,$(BIN)/python,units,$(SEVERAL_AT_A_TIME) --ignore=tests/e2e \
	    $$($(HAS_NEWER_PYTHON) && echo --ignore=tests/adapter/megatron) -m "not soak" $(PYTEST_ARGS))

# NeMo wants older releases of much else, so it has an environment of its own. Its `lightning` extra leaves out what
# `nemo.lightning` imports (nvidia-resiliency-ext), what its AutoResume does (pandas), what writes its context (nemo-run),
# and what `nemo.collections.llm` imports, without which its strategy saves nothing: in releases that fit each other.
NEMO_BIN := .venv-nemo/bin
NEMO_STAMP := .venv-nemo/.setup-stamp
NEMO_PINS := "torch==2.13.0" "nemo_toolkit[lightning]==2.4.0" "megatron-core==0.13.1"
NEMO_LLM := "nvidia-modelopt==0.37.0" "anyio<=4.9" "datasets<4" einops "huggingface-hub<1" ijson jieba matplotlib \
    opencc "pangu<5" pulp "pyarrow<22" rouge_score sacrebleu sentencepiece tensorstore tiktoken torchprofile

$(NEMO_STAMP): Makefile pyproject.toml
	test -x $(NEMO_BIN)/python || $(PYTHON) -m venv .venv-nemo
	$(NEMO_BIN)/python -m pip install -q "setuptools>=77" $(NEMO_PINS)
	$(NEMO_BIN)/python -m pip install -q nvidia-resiliency-ext
	$(NEMO_BIN)/python -m pip install -q $(NEMO_PINS) $(NEMO_LLM) "nemo-run==0.5.0" "leptonai<0.30" "pandas<3" \
	    "protobuf~=5.29.5" "packaging<25"
	$(NEMO_BIN)/python -m pip install -q hypothesis pytest pytest-timeout pytest-xdist
	$(NEMO_BIN)/python -m pip install -q --no-build-isolation -e .
	touch $@

test-nemo: setup $(NEMO_STAMP)
	$(call pytest,$(NEMO_BIN)/python,nemo,$(FEWER_AT_A_TIME) -p no:logging tests/adapter/nemo tests/e2e/test_nemo_*.py $(PYTEST_ARGS))

# megatron-core needs Python 3.12 since 0.17. The newest release that is supported, and in a folder beside it the oldest
# of those; .venv-nemo has the oldest of all, and .venv one between. A large download that breaks off is tried again.
NEWER_BIN := .venv-megatron/bin
NEWER_STAMP := .venv-megatron/.setup-stamp
NEWER_PINS := "torch==2.13.0" "megatron-core==0.19.2"
NEWER_OLDEST := "megatron-core==0.17.1"
NEWER_PYTHON = $$($(BIN)/python -m tests.support.matrix --find 3.12)
NEWER_PIP := $(NEWER_BIN)/python -m pip install -q --retries 10 --timeout 60

$(NEWER_STAMP): Makefile pyproject.toml | $(STAMP)
	test -x $(NEWER_BIN)/python || $(NEWER_PYTHON) -m venv .venv-megatron
	for attempt in 1 2 3; do $(NEWER_PIP) "setuptools>=77" $(NEWER_PINS) && exit 0; sleep 10; done; exit 1
	$(NEWER_PIP) hypothesis pytest pytest-timeout pytest-xdist
	$(NEWER_PIP) --no-build-isolation -e .
	rm -rf .venv-megatron/oldest
	$(NEWER_PIP) --no-deps --target .venv-megatron/oldest $(NEWER_OLDEST)
	touch $@

# Promises of the Megatron-LM door, which are the same with every release.
MEGATRON_JOBS := tests/conformance/test_megatron.py tests/e2e/test_megatron.py tests/test_doc_blocks.py::test_megatrons_strategies
HAS_NEWER_PYTHON = $(BIN)/python -m tests.support.matrix --find 3.12 > /dev/null

test-megatron: setup
	@$(HAS_NEWER_PYTHON) || echo "skipped: what needs megatron-core 0.19, which needs Python 3.12: there is none here"
	! $(HAS_NEWER_PYTHON) || $(MAKE) $(NEWER_STAMP)
	! $(HAS_NEWER_PYTHON) || $(call pytest,$(NEWER_BIN)/python,megatron,$(FEWER_AT_A_TIME) -m "not soak" \
	    tests/adapter/megatron $(MEGATRON_JOBS) $(PYTEST_ARGS))

# torchtitan and DeepSpeed change what other libraries do as soon as they can be imported, so they lie in an environment of
# their own, which has all that .venv has. DeepSpeed's native operators are for other devices.
TRAINERS_BIN := .venv-trainers/bin
TRAINERS_STAMP := .venv-trainers/.setup-stamp
TRAINERS_PINS := "torchtitan==0.3.0" "deepspeed==0.19.8"
TRAINERS_JOBS := $(wildcard tests/adapter/torchtitan tests/adapter/deepspeed tests/conformance/test_torchtitan.py \
    tests/conformance/test_deepspeed.py tests/e2e/test_torchtitan*.py tests/e2e/test_deepspeed*.py)
HAS_TRAINERS = $(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))"

$(TRAINERS_STAMP): Makefile $(STAMP)
	test -x $(TRAINERS_BIN)/python || $(BIN)/python -m venv .venv-trainers
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
	    $$($(TRAINERS_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/what_venv_has.pth
	DS_BUILD_OPS=0 $(TRAINERS_BIN)/python -m pip install -q --no-build-isolation $(TRAINERS_PINS)
	touch $@

test-trainers: setup
	@$(HAS_TRAINERS) || echo "skipped: what needs torchtitan, which needs Python 3.11"
	! $(HAS_TRAINERS) || $(MAKE) $(TRAINERS_STAMP)
	! $(HAS_TRAINERS) || $(call pytest,$(TRAINERS_BIN)/python,trainers,$(FEWER_AT_A_TIME) -m "not soak" $(TRAINERS_JOBS) $(PYTEST_ARGS))

# Megatron-Bridge is for GPUs, and its own requirements need one: here is what its code imports where it saves and loads.
BRIDGE_BIN := .venv-bridge/bin
BRIDGE_STAMP := .venv-bridge/.setup-stamp
BRIDGE_PINS := "transformers==5.12.1" "accelerate<2" "attrs<27" "bitstring<6" "bracex<3" "braceexpand<1" "cffi<3" "datasets<6" \
    "deprecation<3" "einops<1" "filetype<2" "hydra-core>=1.3.4,<1.4" "jsonschema<5" "lark<2" "matplotlib<4" "nvidia-modelopt<1" \
    "omegaconf<3" "opentelemetry-sdk<2" "peft<1" "pillow" "rapidyaml<1" "regex" "requests<3" "rpds-py" "s3fs" "six<2" "soundfile<1" \
    "tensorboard<3" "tqdm<5" "urllib3<3" "wcmatch" "webdataset<2" "xattr<2"

$(BRIDGE_STAMP): Makefile $(NEWER_STAMP)
	test -x $(BRIDGE_BIN)/python || $(NEWER_BIN)/python -m venv .venv-bridge
	$(NEWER_BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
	    $$($(BRIDGE_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/what_venv_megatron_has.pth
	$(BRIDGE_BIN)/python -m pip install -q $(BRIDGE_PINS)
	$(BRIDGE_BIN)/python -m pip install -q --no-deps "megatron-bridge==0.6.2" "megatron-energon==7.4.1" "multi-storage-client==1.3.1"
	touch $@

test-bridge: setup $(BRIDGE_STAMP)
	$(BRIDGE_BIN)/python -m pytest -p no:logging -n 0 -m soak tests/e2e/test_megatron_bridge.py $(PYTEST_ARGS)

# With 0.13, 0.17 and 0.19, of each the first release that has its differences; with 0.16 it is in the rest of `make soak`.
soak-megatron: setup $(NEMO_STAMP) $(NEWER_STAMP)
	$(NEMO_BIN)/python -m pytest $(JOBS_AT_A_TIME) -p no:logging tests/adapter/megatron/test_releases.py $(MEGATRON_JOBS) \
	    tests/local/test_compat.py $(PYTEST_ARGS)
	PYTHONPATH=$(CURDIR)/.venv-megatron/oldest $(NEWER_BIN)/python -m pytest $(JOBS_AT_A_TIME) tests/adapter/megatron $(MEGATRON_JOBS) $(PYTEST_ARGS)
	$(NEWER_BIN)/python -m pytest $(JOBS_AT_A_TIME) tests/adapter/megatron $(MEGATRON_JOBS) $(PYTEST_ARGS)

soak: setup
	$(BIN)/pytest -m soak $(PYTEST_ARGS)
	FLASHPOINT_TEST_FAULTS=5 $(BIN)/pytest $(SEVERAL_AT_A_TIME) -m "not soak" tests/faults tests/ranks tests/engine $(PYTEST_ARGS)
	MLF_TEST_COLD=1 $(BIN)/pytest $(JOBS_AT_A_TIME) -m "not soak" tests/e2e $(PYTEST_ARGS)
	$(MAKE) soak-megatron

matrix: setup
	$(BIN)/python -m tests.support.matrix $(MATRIX_ARGS)

demo: setup
	PYTHONPATH=. $(BIN)/python examples/lose_a_machine.py $(DEMO_ARGS)

bench: setup
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# With matplotlib, for the plots: no part of setup, as nothing else needs it.
BENCH_STAMP := .venv/.bench-stamp

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[bench]"
	touch $@

bench-peers: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks.rivals --make
	$(BIN)/python -m benchmarks.rivals --json build/bench-peers/results.json --plots docs $(BENCH_ARGS)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

CUDA_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
WITH_TREE := PYTHONPATH=$(CURDIR)/src:$(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH)) $(CUDA_PYTHON)
HAS_CUDA = $(CUDA_PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.device_count())"

# First what is about devices, one at a time; then the quick tests, to see that a device in sight changes nothing.
test-cuda:
	$(WITH_TREE) -m pytest tests/cuda $(PYTEST_ARGS)
	@$(HAS_CUDA) || echo "skipped: the other tests on a device, of which there is none here"
	! $(HAS_CUDA) || $(WITH_TREE) -m pytest -m cuda $$(grep -rl "mark\.cuda" tests --include="test_*.py" --exclude-dir=cuda) $(PYTEST_ARGS)
	! $(HAS_CUDA) || $(WITH_TREE) -m pytest $(SEVERAL_AT_A_TIME) --ignore=tests/e2e --ignore=tests/cuda \
	    -m "not slow and not e2e and not cuda and not soak" $(PYTEST_ARGS)

bench-cuda:
	$(WITH_TREE) -m benchmarks.cuda --json cuda.json $(BENCH_ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-nemo .venv-megatron
