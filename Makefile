# Everything a fresh clone needs, from nothing but Python >= 3.10, a C++ compiler, CMake and git. 'make help' lists the targets.

PYTHON ?= python3
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN)

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
MODEL  := smollm2
TEXTS  ?= python

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

C_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.c' 2>/dev/null)
SOURCES := CMakeLists.txt pyproject.toml $(shell find cmake csrc src -type f -not -name '*.pyc' 2>/dev/null)

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-c test-python conformance sanitize bench scorer lint format clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.kvtier-stamp ## Create .venv with llama.cpp (compiled once, a few minutes) and kvtier

demo: setup build/demo.txt ## Run a 7,000-token text with two fifths of its KV cache in RAM, the rest on disk
	@echo "The text asks for a number that stands a fifth into it, and is on disk by then: 7318052."
	$(BIN)/kvtier run $(MODEL) -c 8k -f build/demo.txt --kv-host 64MiB --kv-disk 1GiB -n 24 --temp 0

test: test-c sanitize test-python ## Run all tests: C++, sanitizers, Python, upstream's conformance tests

test-c: build/CMakeCache.txt ## Run the C++ tests
	cmake --build build
	cd build && ctest --output-on-failure --timeout 600

test-python: setup build/CMakeCache.txt ## Run the Python tests, conformance included
	cmake --build build --target test-recall
	$(BIN)/python -m pytest

conformance: setup ## Run llama.cpp's own test-backend-ops and test-llama-archs on our device
	$(BIN)/python -m pytest tests/conformance

sanitize: third_party/llama.cpp/.kvtier-stamp ## Run the C++ tests under the address, undefined-behaviour and thread sanitizers
	scripts/sanitize.sh

bench: setup ## Print the table of decode and prefill rates beside stock llama.cpp, with the roofline
	$(BIN)/kvtier bench

scorer: setup ## Train the scorer's weights anew on TEXTS (files, or 'python'), judged by HELD_OUT
	$(BIN)/kvtier scorer train $(TEXTS) -m smollm2 -m gemma3-270m $(addprefix --held-out ,$(HELD_OUT)) --traces build/traces -o src/kvtier/policies/weights.npz

lint: $(VENV)/.lint-stamp setup ## Check style, formatting and types
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check --quiet src tests scripts
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.lint-stamp ## Format the code as 'make lint' wants it
	$(BIN)/ruff format --quiet src tests scripts
	$(BIN)/clang-format -i $(C_SOURCES)

clean: ## Remove what was built (.venv and the llama.cpp source stay)
	rm -rf build dist

distclean: clean ## Remove .venv and the llama.cpp source too
	rm -rf $(VENV) third_party/llama.cpp third_party/*.tar.gz

$(VENV)/.venv-stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "kvtier needs Python 3.10 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Fix: install the venv module of Python (Debian/Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	touch $@

third_party/llama.cpp/.kvtier-stamp: scripts/fetch-llama.py | $(VENV)/.venv-stamp
	$(BIN)/python scripts/fetch-llama.py
	touch $@

# From the checked source package, so that the libraries are those of the pin. Where llama.cpp's default build crashes
# or is slow (AMX that faults, AVX512_FP16), the probe answers with better switches. CMAKE_ARGS of yours win.
# Without pip's cache, which would hand out what was built here with other switches.
$(VENV)/.llama-stamp: third_party/llama.cpp/.kvtier-stamp scripts/probe-build.py src/kvtier/machine/buildargs.py
	@echo "compiling llama.cpp for Python (once; about 4 minutes on 2 cores)"
	args="$$($(BIN)/python scripts/probe-build.py)" && CMAKE_ARGS="$$args $$CMAKE_ARGS" \
	    $(PIP) install --quiet --no-cache-dir "$$($(BIN)/python scripts/fetch-llama.py --print-sdist)"
	touch $@

$(VENV)/.kvtier-stamp: $(VENV)/.llama-stamp $(SOURCES)
	$(PIP) install --quiet '.[test]'
	touch $@

$(VENV)/.lint-stamp: pyproject.toml | $(VENV)/.venv-stamp
	$(PIP) install --quiet 'ruff==0.17.6' 'clang-format==23.1.5' 'mypy>=1.11,<=2.4.1' types-cffi types-psutil
	touch $@

build/CMakeCache.txt: third_party/llama.cpp/.kvtier-stamp
	cmake -S . -B build -DKVTIER_BUILD_TESTS=ON

build/demo.txt: scripts/demo-text.py | $(VENV)/.venv-stamp
	mkdir -p build
	$(BIN)/python scripts/demo-text.py $@
