# One file for people and for CI: `make train`, `make test`, `make check`.
PYTHON ?= python3
PROFILE ?= profiles/local
# For a short training: make train SNAKEMAKE_ARGS='--config "train={train_steps: 30}"'
SNAKEMAKE_ARGS ?=
# The run that `make demo` serves, or a checkpoint of any format.
RUN ?= results/tiny/training
# For the quick tests: make test PYTEST_ARGS='-m "not slow and not ranks and not grid"'
PYTEST_ARGS ?=
EXECUTORS := pbs sbatch
BIN := .venv/bin
SNAKEMAKE := $(BIN)/snakemake --profile $(PROFILE)
STAMP := .venv/installed
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DS_BUILD_OPS := 0
export NO_MKDOCS_2_WARNING := 1
# Container images often set it. Every process would then compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install train demo test test-all compositions faults test-fresh check docs format clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## make .venv with tokamake, everything it needs and the developer tools

# Python is installed in place, so only a new dependency or changed C++ installs again.
$(STAMP): pyproject.toml constraints.txt $(wildcard lib/csrc/* lib/*/pyproject.toml)
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found; apt-get install python3 python3-venv"; exit 2; }
	@$(PYTHON) -c 'import sys; exit(sys.version_info < (3, 11))' \
		|| { echo "$$($(PYTHON) --version) is too old; give Python 3.11 or later: make PYTHON=/path/to/python3"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { rm -rf .venv; echo "python3 -m venv failed; apt-get install python3-venv"; exit 2; }
	@$(PYTHON) -c 'import pathlib, sysconfig as s; exit(not (pathlib.Path(s.get_path("include")) / "Python.h").exists())' \
		|| { echo "no Python.h, which compiling the extension needs; apt-get install python3-dev"; exit 2; }
	@echo 'installs into .venv: minutes, and longer for a torch with CUDA (about 6 GB)'
	$(BIN)/pip install --quiet torch
	$(BIN)/pip install --quiet --editable '.[dev]' $(EXECUTORS:%=--editable lib/snakemake_executor_plugin_%)
	@# MPICH is for tests alone. In the environment it would hide the site's mpiexec and libmpi from jobs.
	$(BIN)/pip uninstall -qq --yes mpich
	$(BIN)/pip install --quiet --prefix .venv/mpich mpich
	@# The other executor for Slurm, for its tests alone: every start of Snakemake would import it.
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv/slurm-plugin snakemake-executor-plugin-slurm snakemake-executor-plugin-slurm-jobstep throttler
	@# The last version with Retro, for its tests alone. The one in the environment is newer.
	PIP_CONSTRAINT= $(BIN)/pip install --quiet --no-deps --upgrade --target .venv/megatron-core-0.15.3 megatron-core==0.15.3
	touch $@

train: install  ## raw text to trained model (the target train) and results/report.html (report)
	$(SNAKEMAKE) train report $(SNAKEMAKE_ARGS)

demo: install  ## serve the model that `make train` made, with a page at http://127.0.0.1:5000
	$(BIN)/tokamake serve $(RUN)

test: install  ## test each module, kind of layout and format, the workflow and every user mistake
	$(BIN)/pytest -n 4 --dist worksteal -m "not grid" $(PYTEST_ARGS)

test-all: install  ## run every test: large grids of layouts, conversions and kills too
	$(BIN)/pytest -n 4 --dist worksteal -m "not compositions" $(PYTEST_ARGS)

compositions: install  ## prove random compositions with each pair of settings five times: more than half an hour
	$(BIN)/pytest -n 2 --dist worksteal -m compositions $(PYTEST_ARGS)

faults: install  ## inject faults into stages, runs and workflows; count what survives (part of test-all)
	$(BIN)/pytest -n 4 --dist worksteal -m fault $(PYTEST_ARGS)

test-fresh:  ## make train and the quick tests on fresh Debians, each with its own Python; as root
	.ci/fresh

check: install  ## format, lint, types, import layers, workflow
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/snakefmt --check workflow
	$(BIN)/clang-format --dry-run --Werror lib/csrc/*.cpp lib/csrc/*.hpp
	$(SNAKEMAKE) --lint
	$(BIN)/mkdocs build --quiet

docs: install  ## write the reference pages from code and build the site in build/site
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --quiet

format: install  ## rewrite sources in the house format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .
	$(BIN)/snakefmt workflow 2>/dev/null
	$(BIN)/clang-format -i lib/csrc/*.cpp lib/csrc/*.hpp

clean:  ## remove what installs and logs left; results/ stays, it may hold a trained model
	rm -rf .venv build logs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
