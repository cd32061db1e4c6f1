# make build | demo | test | test-cuda-sim | test-gpu | bench | conformance | lint | types | format
#      cpp-test | wheel | clean
#
#   PYTHON=python3.12             interpreter that makes the environment
#   VENV=path                     the environment: made when it does not exist, else used as it is
#   TORCH='torch==2.13.0'         torch to install (default: what VENV has, else torch==2.14.1)
#   SANITIZE=address,undefined    sanitizers of cpp-test: address, undefined, thread
#   TESTS='tests -k layout'       what `make test` gives to pytest
#   DEMO='--steps 20 --dtype bf16'  options of examples/train_lm.py; NPROC=4 ranks
#   FSDPX_CUDA=0|1  MAX_JOBS=n    see setup.py

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
SANITIZE ?=
TESTS ?= tests
NPROC ?= 2
OUT ?= out
DEMO ?=

BENCHES := collectives kernels step desync_check
PY := $(VENV)/bin/python
TORCH_DEFAULT := torch==2.14.1
PACKAGES := 'setuptools>=77' wheel numpy 'cmake>=3.22' ninja pytest pytest-timeout hypothesis ruff mypy clang-format
TORCHRUN := $(PY) -m torch.distributed.run --standalone --nproc-per-node $(NPROC)
comma := ,
CPP_DIR := build/cpp$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := build
.PHONY: env build demo test test-cuda-sim test-gpu bench conformance lint types format cpp-test wheel clean

# What was installed is written down: a second run installs nothing.
env:
	@test -x $(PY) || { echo "env: making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@torch="$(TORCH)"; \
	if [ -z "$$torch" ]; then \
	  $(PY) -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || torch="$(TORCH_DEFAULT)"; \
	fi; \
	want="$$torch $(PACKAGES)"; \
	if [ "$$(cat $(VENV)/.fsdpx-env 2>/dev/null)" != "$$want" ]; then \
	  echo "env: installing $${torch:-no torch (it is there)} and tools into $(VENV)"; \
	  $(PY) -m pip install -q --upgrade-strategy only-if-needed $${torch:+"$$torch"} $(PACKAGES) && \
	  if [ -z "$(TORCH)" ]; then echo " $(PACKAGES)"; else echo "$$want"; fi > $(VENV)/.fsdpx-env; \
	fi

# pip once per environment; then CMake and Ninja see for themselves what changed. The build directory
# belongs to one torch, and the module is put in place again when the environment is another one.
build: env
	@if [ "$$(cat $(VENV)/.fsdpx-editable 2>/dev/null)" != "$(CURDIR)" ]; then \
	  echo "build: installing fsdpx (editable) into $(VENV)"; \
	  $(PY) -m pip install -q --no-build-isolation --no-deps -e . && echo "$(CURDIR)" > $(VENV)/.fsdpx-editable; \
	else \
	  $(PY) setup.py -q build_ext --inplace; \
	fi

test: build
	@echo "test: pytest $(TESTS)"
	@$(PY) -m pytest -q $(TESTS)

# A simulation, no GPU is involved (tests/cudasim/README.md). Says why when it cannot run here.
test-cuda-sim: build
	@echo "test-cuda-sim: pytest -m 'gpu or simulation' $(TESTS), simulated"
	@$(PY) tests/cudasim/run.py -m pytest -q -m 'gpu or simulation' $(TESTS)

# The same tests on real GPUs, one or several; several ranks share one GPU if there are too few.
test-gpu: build
	@echo "test-gpu: pytest -m gpu $(TESTS)"
	@$(PY) -m pytest -q -m gpu $(TESTS)

demo: build
	@echo "demo: $(NPROC) ranks train a small GPT; the timeline goes to $(OUT)/"
	@mkdir -p $(OUT)
	@$(TORCHRUN) examples/train_lm.py --out $(OUT) $(DEMO)

bench: build
	@for program in $(BENCHES); do \
	  echo "bench: $$program on $(NPROC) ranks"; $(TORCHRUN) bench/$$program.py || exit 1; \
	done

conformance: build
	@echo "conformance: the whole matrix; writes docs/conformance.md"
	@$(PY) tests/conformance/matrix.py --write

lint: env
	@echo "lint: ruff, clang-format"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

format: env
	@echo "format: ruff, clang-format"
	@$(PY) -m ruff check --fix-only -q .
	@$(PY) -m ruff format -q .
	@$(VENV)/bin/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

types: env
	@echo "types: mypy --strict"
	@$(PY) -m mypy

cpp-test: env
	@echo "cpp-test: $(CPP_DIR)$(if $(SANITIZE), with -fsanitize=$(SANITIZE))"
	@PATH="$(abspath $(VENV))/bin:$$PATH"; \
	cmake -S . -B $(CPP_DIR) -G Ninja --log-level=WARNING -DFSDPX_TESTS=ON -DFSDPX_WERROR=ON '-DFSDPX_SANITIZE=$(SANITIZE)' && \
	cmake --build $(CPP_DIR) $(if $(MAX_JOBS),--parallel $(MAX_JOBS)) && \
	ctest --test-dir $(CPP_DIR) --output-on-failure --no-tests=error

wheel: env
	@echo "wheel: into dist/"
	@rm -rf build/lib.* build/bdist.* dist
	@$(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	@$(PY) tests/check_wheel.py dist/fsdpx-*.whl

clean:
	@echo "clean: build products (environments stay)"
	@rm -rf build dist *.egg-info fsdpx/_C*.so fsdpx/_build_info.py
	@rm -f $(VENV)/.fsdpx-editable
