# One command each, on a fresh machine with nothing but Python, make and a compiler: every target makes its own
# environment in .venv, and finds it ready the second time.
#
# Torch needs no special case: `torch==…` in constraints.txt is met by a CPU and by a CUDA build alike, and pip takes the
# one it is offered. With pip as it comes, a Linux machine gets the CUDA build, which also runs where there is no GPU;
# where pip's own settings offer a CPU build, that one is taken.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.core-installed
DEV    := $(VENV)/.dev-installed
# The tools for the documents are among those for testing, so an environment that has these needs no others.
DOCS   := $(or $(wildcard $(DEV)),$(VENV)/.docs-installed)
# An environment holds the path of its folder and of its Python: where either is another now, it is made again.
MADE   := $(VENV)/.made-with
WITH   := $(CURDIR) $(PYTHON)
STALE  := $(shell [ "$$(cat $(MADE) 2>/dev/null)" = "$(WITH)" ] || echo stale)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# How many processes share the tests; where nothing is said, one for each processor, and one more where tests only compute
# and wait a little.
WORKERS ?=
EACH    := $(or $(WORKERS),auto)
MORE    := $(or $(WORKERS),$(shell expr $$(getconf _NPROCESSORS_ONLN) + 1))
# Bytecode is written also where the environment says not to: every process that a test starts would compile it anew.
PYTEST  := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --maxprocesses 4 --dist loadgroup --numprocesses
# The tiers, by the markers of pyproject.toml: `test` holds what `check` does, `soak` holds all.
CHECK   := not slow and not integration and not soak and not gpu
TEST    := not integration and not soak and not gpu
SMOKE   := smoke and not soak and not gpu
SERVERS := integration and not soak and not gpu

# The packages that `make coverage` holds to a floor (tests/coverage_floor.py) are covered by these tests alone.
EXACT := $(addprefix tests/,algorithms batch config conformance)

# The part of the integration tests to run, such as 2/4 for the second of four; all where nothing is said.
PART ?=

# How often `make chaos` kills a run, and what `make bench` measures.
KILLS ?= 50
BENCH ?= algorithms train_step train_engines adapters rollout filters rollout_queue agents grpo_vs_trl growth sync crews asynchronous plan view

.DEFAULT_GOAL := help
.PHONY: help demo check test coverage smoke integration soak durations venv environments chaos lint bench gpu docs clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CORE) ## watch a language model learn, from nothing, in about three minutes
	$(BIN)/python -m etude demo

check: $(DEV) ## run the tests that are quick, with a few random examples: while you work
	$(PYTEST) $(MORE) -m "$(CHECK)" --hypothesis-profile check

test: $(DEV) ## run all that a user would notice: before a commit
	$(PYTEST) $(MORE) -m "$(TEST)"

coverage: $(DEV) ## hold the line coverage of the packages that must be exact, by their own tests
	$(PYTEST) $(MORE) -m "$(TEST)" --cov --cov-report=json:coverage.json $(EXACT)
	$(BIN)/python -m tests.coverage_floor coverage.json

smoke: $(DEV) ## make one short real run with each server, cluster and client, and after a kill: continuous integration does
	$(PYTEST) $(EACH) -m "$(SMOKE)" --timeout 600

integration: $(DEV) ## run the tests with PostgreSQL, Ray, vLLM, SGLang, clients, kills and learning: before a release (PART=2/4 for a part)
	$(PYTEST) $(EACH) -m "$(SERVERS)" --timeout 900 $(if $(PART),--part $(PART))

soak: $(DEV) ## run all of these with ten times the random examples, and the long tests too: before a release
	$(PYTEST) $(EACH) -m "not gpu" --hypothesis-profile soak --timeout 1800

durations: $(DEV) ## record how long the tests take, on a machine that does nothing else (tests/durations.json)
	$(PYTEST) $(EACH) -m "not soak and not gpu" --timeout 900 --record-durations

venv: $(DEV) ## make the environment that all these commands run in

environments: $(DEV) ## make the environments of the servers and clients that ETUDE_REQUIRE names, for the tests
	$(BIN)/python -m tests.environments

chaos: $(DEV) ## kill runs fifty times, of agents too, resume them, and print whether anything was lost (KILLS=… for more)
	$(BIN)/python -m tests.chaos.table --kills $(KILLS)

lint: $(DEV) ## ruff (lint and format), mypy --strict, and biome for the viewer's pages; no finding is allowed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.view.lint

bench: $(DEV) ## time algorithms, steps, adapters, crews, weight transports, and peers (BENCH=train_step for one of them)
	set -e; for name in $(BENCH); do $(BIN)/python -m bench.$$name; done

gpu: $(DEV) ## measure what the GPU of this machine does, in ten minutes (gpu.json)
	$(BIN)/python -m bench.gpu --json gpu.json

docs: $(DOCS) ## write the generated pages, make a site of all (site/index.html), and check what the documents name
	$(BIN)/python -m tests.conformance.document
	$(BIN)/python -m tests.conformance.laboratory_page
	$(BIN)/python -m tests.pages.document
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest -m "not integration" tests/house/test_links.py tests/house/test_pages.py tests/house/test_site.py

clean: ## remove the environment and everything that can be made again
	rm -rf $(VENV) build dist site coverage.json .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find etude tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Written last: an environment whose pip could not be made is made again.
$(MADE): $(STALE)
	@command -v $(PYTHON) >/dev/null || { echo "Etude needs Python 3.11 or newer, and there is no $(PYTHON) here." \
	  "Install it, or name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Etude needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV)
	@echo "$(WITH)" > $@

stale:

$(CORE): pyproject.toml constraints.txt $(MADE)
	@echo "Installing Etude into $(VENV) (torch is large: a minute or more the first time) ..."
	$(PIP) --editable '.[agents]'
	@touch $@

$(VENV)/.docs-installed: $(CORE)
	@echo "Installing the tools for the documents into $(VENV) ..."
	$(PIP) --editable '.[agents,docs]'
	@touch $@

$(DEV): $(CORE)
	@echo "Installing the tools for testing into $(VENV) ..."
	$(PIP) --editable '.[dev,agents,lora,postgres,ray,trackers]'
	@touch $@
