# `make demo` and `make test` set everything up and need nothing but Python 3.11+ and git.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip names each package as it comes, and shows a bar on a terminal; what is there already is not worth a line.
# setuptools warns of folders of data in an editable install, at length, and a new pip passes that on.
NO_WARNINGS := -W ignore::UserWarning
PIP = $(BIN)/python $(NO_WARNINGS) -m pip install --disable-pip-version-check -c constraints.txt
# Python's own pip may be years old; this one finds a list of packages that fit together in half the time.
NEW_PIP = -m pip install --quiet --disable-pip-version-check pip==26.3 || echo "no pip 26.3 here: the old one takes longer"
ARGS ?=
# Three processes run tests, on two cores too: most tests wait. Each holds one to three gigabytes, most of it torch.
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
.DEFAULT_GOAL := help
.PHONY: help setup demo up test lint types format unit quick chaos coverage clean

help: ## Say what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# A stamp: a second `make` starts at once. torch comes first and pinned, so that nothing pulls another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt tests/peers_requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "draftalign needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "setting up $(VENV), once: one to three minutes on a quiet machine, up to fifteen on a busy one"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(NEW_PIP)
	@echo "1 of 3: PyTorch, the largest part"
	@$(PIP) torch
	@echo "2 of 3: draftalign and what it needs, some 150 packages"
	@$(PIP) -e '.[dev]'
	@echo "3 of 3: other projects' packages that tests compare with"
	@$(PIP) --no-deps -r tests/peers_requirements.txt
	@touch $@

setup: $(VENV)/.ready ## Make the virtual environment

demo: $(VENV)/.ready ## Run real RL whose drafter stays in step (ARGS="--seed 7 --steps 30")
	@$(BIN)/draftalign demo $(ARGS)

up: $(VENV)/.ready ## Start the service: embedded Valkey, API, worker
	@$(BIN)/draftalign up $(ARGS)

test: $(if $(CI),machine lint,lint types) unit ## Everything that CI runs

# CI's machine starts empty: bring what some tests use, where it can be had. Without it they say so and are skipped.
# Each is brought by one process, which mostly waits or unpacks: side by side, and beside mypy.
MACHINE := try-vllm try-sglang try-packages try-kubectl try-sbom
.PHONY: machine $(MACHINE)
machine:
	@$(MAKE) --no-print-directory -j6 types $(MACHINE)

try-vllm:
	@timeout 1200 $(MAKE) --no-print-directory vllm || echo "no vLLM here: its tests are skipped"

try-sglang:
	@timeout 1200 $(MAKE) --no-print-directory sglang || echo "no SGLang here: its tests are skipped"

try-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! (command -v chromium && command -v promtool) >/dev/null; \
	then { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y chromium prometheus; } \
	  >/dev/null 2>&1 || echo "no Chromium or promtool here: tests of the page and of the alert rules are skipped"; fi

try-kubectl:
	@command -v kubectl >/dev/null || $(MAKE) --no-print-directory .venv-kubectl/.ready || echo "no kubectl here: the tests of deploy/kubernetes fail in CI, and are skipped elsewhere"

try-sbom:
	@$(MAKE) --no-print-directory .venv-sbom/.ready || echo "no cyclonedx-bom here: the test of the list of packages is skipped"

lint: $(VENV)/.ready ## Style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet . && echo "lint: ok"

types: $(VENV)/.ready ## Strict types, of tests and benchmarks too
	@$(BIN)/mypy --no-error-summary && echo "types: ok"

unit: $(VENV)/.ready ## The tests (ARGS="-k replay")
	@$(BIN)/python -m pytest $(PARALLEL) --durations 30 --ignore tests/stacks $(ARGS)

quick: $(VENV)/.ready ## Some 3,800 tests that take less than 0.1 s each (one to four minutes, by load)
	@$(BIN)/python -m pytest $(PARALLEL) -m quick --ignore tests/vllm_server --ignore tests/sglang_server --ignore tests/stacks $(ARGS)

coverage: $(VENV)/.ready ## The lines of service, drafter and rl_hooks that no test runs (not part of `make test`)
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run -m pytest $(PARALLEL) --ignore tests/vllm_server --ignore tests/sglang_server --ignore tests/stacks $(ARGS)
	@$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report --skip-covered --show-missing

chaos: $(VENV)/.ready ## The long form of the fault tests: 100 kills, a stop before every step, 1,000 bits (20 minutes)
	@DRAFTALIGN_CHAOS_KILLS=100 DRAFTALIGN_HANDOVERS=0 DRAFTALIGN_RANK_KILLS=0 DRAFTALIGN_FLIPS=1000 $(BIN)/python -m pytest -m chaos $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.ready ## Change gate, acceptance, drift and controller: which changes no test notices? (ARGS="service.monitor.controller*")
	@$(BIN)/python -m pip install --quiet mutmut==3.8.1
	@OMP_NUM_THREADS=1 $(BIN)/mutmut run $(ARGS); $(BIN)/mutmut results

.PHONY: fuzz soak
fuzz: $(VENV)/.ready ## schemathesis on the API, some 10,000 requests (a quarter of an hour)
	@DRAFTALIGN_FUZZ_EXAMPLES=460 $(BIN)/python -m pytest tests/service/api/test_fuzz.py -s $(ARGS)

soak: $(VENV)/.ready ## An hour under load: is the service flat? (ARGS="--rate 64")
	@$(BIN)/python -m benchmarks.soak --minutes 60 --rate 640 --json soak.json --plot soak.png $(ARGS)

format: $(VENV)/.ready ## Rewrite to the style
	@$(BIN)/ruff check --fix-only --quiet . ; $(BIN)/ruff format .

include make/vllm.mk
include make/sglang.mk
include make/stacks.mk
include make/containers.mk
include make/stores.mk

clean: ## Remove what was made here, the demo's output excepted
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info rl_hooks/*.egg-info rl_hooks/build .draftalign
