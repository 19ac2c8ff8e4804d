# Needs Python 3.11 or later with pip, and nothing else: the first target that runs makes .venv.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell $(name) -c 'print("$(name)")' 2>/dev/null)))
ARGS ?=
BIN := .venv/bin
CORE := .venv/.core
READY := .venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What is installed is compiled when it is first imported, once for all processes.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable
unexport PYTHONDONTWRITEBYTECODE

TESTS = $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-slow test-thorough test-all compiler torch versions repro bench builder site release-check gpu lint format clean

demo: $(CORE)
	$(BIN)/python -m eqsat_mem demo $(ARGS)

test: $(READY)
	$(TESTS) -m "not slow" $(ARGS)

test-slow: $(READY)
	$(TESTS) -m "slow and not thorough" $(ARGS)

test-thorough: $(READY)
	$(TESTS) -m thorough $(ARGS)

test-all: $(READY)
	$(TESTS) $(ARGS)

versions:
	.ci/versions $(ARGS)

# XLA's compiler for GPUs, for the tests that ask it: they are skipped where it cannot be installed.
compiler: $(READY)
	@$(BIN)/python -c 'import jax_cuda13_plugin' 2>/dev/null || $(INSTALL) '.[gpu]' \
	  || echo "the compiler for GPUs (the extra gpu) cannot be installed: tests that need it will be skipped" >&2

# PyTorch for CPUs and torchax, for the tests of the page on them, which are skipped where these cannot be installed.
torch: $(READY)
	@$(BIN)/python -c 'from importlib.util import find_spec; exit(not find_spec("torchax"))' \
	  || $(INSTALL) '.[torch]' \
	  || echo "PyTorch for CPUs (the extra torch) cannot be installed: tests that need it will be skipped" >&2

gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu_visit $(ARGS)

repro: $(READY)
	@$(BIN)/python -c 'import faiss, h5py, matplotlib, pykeops, scipy, sklearn, tqdm' 2>/dev/null || $(INSTALL) '.[repro]'
	$(BIN)/python -m paper_repro $(ARGS)

bench: $(READY)
	@$(BIN)/python -c 'import faiss, matplotlib, opt_einsum, pykeops, scipy, sklearn' 2>/dev/null || $(INSTALL) '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

# What builds the site, for it and for its tests, which are skipped where this cannot be installed.
builder: $(CORE)
	@$(BIN)/python -c 'import latex2mathml, material, matplotlib, mermaidx' 2>/dev/null \
	  || $(INSTALL) '.[site]'

# The documentation with the gallery's programs run: build/site/index.html.
site: builder
	$(BIN)/python -m docs.website $(ARGS)

# The wheel and the sdist, built and tried in environments of their own, away from the repository.
release-check:
	.ci/release-check $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venvs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The package with what it needs to run.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "eqsat_mem needs Python 3.11 or later; name one with: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "making .venv with $(PYTHON); this happens once" >&2
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	@touch $@

# The tools of development besides.
$(READY): $(CORE)
	$(INSTALL) '.[test,libraries]'
	@touch $@
