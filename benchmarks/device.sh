#!/bin/sh
# Check and measure tokamake on one accelerator (CUDA or XPU), in at most 6 minutes:
#
#     benchmarks/device.sh --work DIR
#
# The exit status is 1 if a case failed, 3 if something was left out, 2 without an accelerator.
# Writes DIR/device.json and DIR/device.md, a table for RESULTS.md. benchmarks/device.py says more.
# PYTHON is a Python that has tokamake. The default is .venv/bin/python, which `make install` makes.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/.."
exec "${PYTHON:-.venv/bin/python}" benchmarks/device.py "$@"
