# Every target sets up what it needs first; a set-up that is up to date costs a moment.
.DEFAULT_GOAL := help
.PHONY: help quickstart train test test-fast gpu-check bench evidence lint format docs setup setup-dev

# Overrides for one command: make train ARGS="env.dataset=math model.name=smollm2-135m"
ARGS ?=
# Commands start many processes, and without bytecode each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
PY := .venv/bin/python
RECIPE := sota-implementations/grpo
CHECKED := torchrl_grpo sota-implementations tests benchmarks examples scripts setup.py

help:  ## Show this list (what `make` alone does)
	@echo 'make TARGET [ARGS="..."] [PYTHON=/path/to/python3.12] [ACCELERATOR=cpu|cuda] [VLLM=0.32|0.24]'
	@echo
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) \
		| awk -F ':.*## ' '{ printf "  %-12s %s\n", $$1, $$2 }'

quickstart: setup  ## Train SmolLM2-135M on arithmetic, measure it before and after; works without a GPU
	$(PY) $(RECIPE)/grpo.py --config-name grpo_quickstart $(ARGS)

train: setup  ## Run grpo.py with ARGS (default: the GSM8K recipe)
	$(PY) $(RECIPE)/grpo.py $(ARGS)

test: setup-dev  ## Run the whole test suite, real vLLM and SmolLM2 included, in three processes (ARGS="-n 0": in one); ARGS go to pytest
	$(PY) -m pytest -n 3 --no-loadscope-reorder $(ARGS)

test-fast: setup-dev  ## Run the tests that take less than half a second each, in three processes; ARGS go to pytest
	$(PY) -m pytest -n 3 --no-loadscope-reorder -m "not integration and not slow" $(ARGS)

gpu-check: setup-dev  ## Check that this machine's GPUs train correctly, in stages of a minute; also runs on a CPU, smaller (ARGS="--only scores float32" is a part)
	$(PY) -m torchrl_grpo.tools.gpu_check $(ARGS)

bench: setup-dev  ## Compare with TRL and TorchRL side by side (hours; ARGS="trl-64 --pairs 2" is a part)
	$(PY) -m benchmarks $(ARGS)

evidence: setup-dev  ## Run experiments of docs/results.md and the pages it links (ARGS="needle --folder FOLDER")
	$(PY) -m benchmarks.evidence $(ARGS)

lint: setup-dev  ## Check style (ruff), formatting (ruff format), types (mypy), imports between subpackages (import-linter), spelling (codespell) and names of variables
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)
	$(PY) -m mypy
	.venv/bin/lint-imports --no-cache
	.venv/bin/codespell
	$(PY) scripts/check_names.py

docs: setup-dev  ## Build the documentation's site, with the API reference, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

format: setup-dev  ## Rewrite files into the project's format and fix what ruff can fix
	$(PY) -m ruff format $(CHECKED)
	$(PY) -m ruff check --fix $(CHECKED)

setup:  ## Make or update .venv: CUDA vLLM where a GPU is found, CPU vLLM otherwise
	@PYTHON="$(PYTHON)" ACCELERATOR="$(ACCELERATOR)" VLLM="$(VLLM)" bash scripts/setup.sh

setup-dev:  ## The same, and what tests and lint need
	@PYTHON="$(PYTHON)" ACCELERATOR="$(ACCELERATOR)" VLLM="$(VLLM)" bash scripts/setup.sh --dev
