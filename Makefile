# `make` alone lists the targets. PYTHON chooses the interpreter of the virtual environment;
# pip's own variables work, e.g. to get PyTorch without CUDA on Linux:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make train

PYTHON ?= python3
# Test processes side by side; many tests start processes of their own.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv train test test-slow mutations bench bench-check check format docs tutorial docker clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

venv: $(STAMP) ## create or update .venv, with the versions of constraints.txt

train: $(STAMP) ## train the default experiment with 8 workers; ARGS="total_steps=1e5" is passed on
	$(BIN)/python -m actorlearner.run workers=8 $(ARGS)

test: $(STAMP) ## run the fast tests; ARGS="-k replay" is passed on
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-slow: $(STAMP) ## run the slow tests only (learning to a threshold)
	$(BIN)/python -m pytest -m slow --timeout 900 $(ARGS)

mutations: $(STAMP) ## plant 53 bugs, each alone in a copy: the tests must catch every one; ARGS="-k replay"
	$(BIN)/python tests/mutations.py $(ARGS)

bench: $(STAMP) ## measure env steps per second beside the machine's limit; ARGS="workers=2 env=atari"
	$(BIN)/python benchmarks/env_steps.py $(ARGS)

bench-check: $(STAMP) ## guard speed: ratios to bare loops, in under three minutes
	$(BIN)/python benchmarks/check.py $(ARGS)

check: $(STAMP) ## format, lint, types and spelling, as CI runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP) ## format the code and apply the safe fixes of the linter
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(STAMP) ## build the documents' site into site/; ARGS="serve" shows it while it is written
	$(BIN)/python docs/configuration.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(or $(ARGS),build)

tutorial: ## do what docs/tutorial.md says, in a new virtual environment (minutes)
	$(PYTHON) tests/tutorial.py

docker: ## build the image "actorlearner"; ARGS="--build-arg EXTRAS=atari" is passed on
	docker build -f docker/Dockerfile -t actorlearner $(ARGS) .

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Touched last: an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing actorlearner and PyTorch into $(VENV): once, and again when their versions change."
	@echo "This takes about a minute, longer where PyTorch has to be downloaded with CUDA."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
