# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SMG_VERSION := 1.13.0
# Its interpreter fails with a newer NumPy.
TRITON_VERSION := 3.6.0
CLIENTS := litellm==1.110.2 langchain-openai==1.7.4 schemathesis==4.32.5
# Two workers for what only computes, file by file, as files share groups. What starts Ray and servers, or
# watches clocks, then runs one at a time: beside each other on two cores they take as long, and fail.
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder
ALONE := -m alone tests
# Tests start Python hundreds of times: each would compile all that it imports.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: help setup setup-dev demo serve test test-all test-fast test-gpu test-kernels lint format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## create .venv and install latentray for the CPU

setup-dev: $(VENV)/.installed-dev  ## the same, with what tests and linters need

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"latentray needs Python >= 3.11; {sys.executable} is {sys.version.split()[0]}. Name another: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e . apache-tvm-ffi
	# 17 MB with apache-tvm-ffi. It asks for Triton and transformers (0.5 GB), which grammars have no use for.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt --no-deps xgrammar
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed $(VENV)/peers/.smg-$(SMG_VERSION) $(VENV)/peers/.clients
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e '.[test,lint]'
	@touch $@

# A router that tests put before a gateway; its dependencies are not ours.
$(VENV)/peers/.smg-$(SMG_VERSION): $(VENV)/.python
	$(PYTHON) -m venv $(VENV)/peers/smg
	$(VENV)/peers/smg/bin/python -m pip install --quiet --disable-pip-version-check smg==$(SMG_VERSION)
	@touch $@

# Clients of OpenAI's API, and what tests a server against its own document.
$(VENV)/peers/.clients: $(VENV)/.python Makefile
	$(PYTHON) -m venv $(VENV)/peers/clients
	$(VENV)/peers/clients/bin/python -m pip install --quiet --disable-pip-version-check $(CLIENTS)
	@touch $@

demo: setup  ## a local Ray group (tp 2, dcp 2, 3 drafts) answers two prompts over gRPC
	$(BIN)/python -m cluster demo

serve: setup  ## serve the bundled checkpoint; pass flags with ARGS="-tp 2 --port 50051"
	$(BIN)/latentray serve $(ARGS)

test: setup-dev  ## all tests: unit, Ray, gateway, end to end; of large products a sample
	$(PYTEST) $(SPREAD) -m "not alone" tests
	$(PYTEST) $(ALONE)

test-all: setup-dev  ## the same with every case of every product (nightly)
	$(PYTEST) $(SPREAD) --all-cases -m "not alone" tests
	$(PYTEST) --all-cases $(ALONE)

test-fast: setup-dev  ## unit tests only: no Ray, no sockets
	$(PYTEST) $(SPREAD) tests/unit -m "not slow and not alone"

test-gpu:  ## kernels on a GPU, with the python that has its torch: make test-gpu PYTHON=python3
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 8 -o addopts="-ra --strict-markers" tests/gpu

test-kernels: $(VENV)/.triton  ## the same kernels in Triton's interpreter, without a GPU (fetches triton, 190 MB)
	PYTHONPATH=$(VENV)/triton:. $(PYTEST) $(SPREAD) tests/gpu

$(VENV)/.triton: $(VENV)/.installed-dev Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps \
		--target $(VENV)/triton triton==$(TRITON_VERSION) "numpy<2.4"
	touch $@

lint: setup-dev  ## ruff, mypy, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev  ## rewrite files to the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
