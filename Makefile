# Everything here works on a fresh machine that has Python >= 3.11, make and pip. The first call builds .venv; later
# calls reuse it until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BENCH_OUT ?= bench_out
# The suite conversion needs 36 GB of room and comes by hand: tnt bench conversion --folder DIR.
BENCH_SUITES ?= memory train decode liza
BENCH_FLAGS ?=

# torch is installed first and pinned: left to the resolver, a newer release with gigabytes of CUDA packages comes along.
# TORCH_INSTALL takes any pip arguments, for example a local wheel or the index of another build of the same release.
TORCH_INSTALL ?= torch==2.13.0
# Only where torch brought none (its CPU builds do not); see the note on triton in constraints.txt.
TRITON_INSTALL ?= triton==3.9.0; platform_system == "Linux" and platform_machine == "x86_64"

PY := $(VENV)/bin/python
PIP_ALOUD := $(PY) -m pip install --disable-pip-version-check
PIP := $(PIP_ALOUD) --quiet
# What the demo and the benchmarks need, and what the tests need beside it.
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.installed-tests

# constraints.txt has the oldest release of transformers that pyproject.toml allows; the tests pass with this one, too.
NEWEST_TRANSFORMERS ?= 5.24.0
NEWEST := $(VENV)-newest

# Test workers and the jobs of the demo share the cores, one torch thread each.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help install test test-newest test-long test-all lint format demo bench clean

help:
	@echo "make test      format and lint checks and the default test suite"
	@echo "make test-newest  the same suite with transformers $(NEWEST_TRANSFORMERS), in $(NEWEST)"
	@echo "make test-long  the tests marked long, which take seconds each: whole programs, most of all"
	@echo "make test-all  the default test suite and the tests marked long or slow"
	@echo "make demo      train a Llama on real text, convert, verify, distil, refine and evaluate it; plots;"
	@echo "               about seven minutes on 2 cores"
	@echo "make bench     all benchmark suites, most of an hour; results go to $(BENCH_OUT)"
	@echo "               BENCH_FLAGS=--quick takes minutes; see also: tnt bench --list"
	@echo "make lint      ruff check and ruff format --check"
	@echo "make format    apply ruff's fixes and formatting"
	@echo "make install   only build the environment in $(VENV)"
	@echo "make clean     remove the environment and caches"

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python >= 3.11 is needed, but PYTHON=$(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 || true); name one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@# Where the system's Python comes without ensurepip, the pip outside furnishes the environment.
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(PY) install --quiet pip; } || { rm -rf $(VENV); exit 1; }

# --no-build-isolation: the editable build uses the pinned setuptools instead of fetching another one.
$(STAMP): pyproject.toml constraints.txt | $(PY)
	@# What takes longest shows its progress.
	$(PIP_ALOUD) --no-compile -c constraints.txt $(TORCH_INSTALL)
	$(PY) -c 'import triton' 2>/dev/null || $(PIP) --no-compile '$(TRITON_INSTALL)'
	$(PIP) -c constraints.txt 'setuptools>=77'
	$(PIP) --no-compile -c constraints.txt --no-build-isolation -e '.[train]'
	@# pip would compile on one core; what does not compile is never imported.
	@$(PY) -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

$(TESTS): $(STAMP)
	$(PIP) -c constraints.txt --no-build-isolation -e '.[dev,train]'
	@touch $@

install: $(TESTS)

test: $(TESTS)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal

test-newest:
	$(MAKE) install VENV=$(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --no-deps transformers==$(NEWEST_TRANSFORMERS)
	$(NEWEST)/bin/python -m pip check
	$(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal

test-long: $(TESTS)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m 'long and not slow'

test-all: $(TESTS)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m 'slow or not slow'

lint: $(TESTS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(TESTS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

demo: $(STAMP)
	$(PY) -m tnt_hf.cli demo

bench: $(STAMP)
	@for suite in $(BENCH_SUITES); do \
	  $(PY) -m tnt_hf.cli bench $$suite --out $(BENCH_OUT) $(BENCH_FLAGS) || exit; done

clean:
	rm -rf $(VENV) $(NEWEST) .pytest_cache .ruff_cache .hypothesis .cache build dist *.egg-info
