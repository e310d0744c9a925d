#!/usr/bin/env bash
# Snakemake runs this in a new environment. It installs the checkout whose Snakefile runs, in place: the
# jobs follow it, as they do without --sdm conda.
set -euo pipefail
PIP_CONSTRAINT="$TOKAMAKE_REPOSITORY/constraints.txt" "$CONDA_PREFIX/bin/python" -m pip install torch \
    --editable "$TOKAMAKE_REPOSITORY[all]"
