# Sourced by every job on Aurora: what tokamake's Python was installed on.
# `frameworks` has Python and torch for the GPUs (ALCF user guide, Aurora, "PyTorch"); install tokamake
# in a venv made after loading it (python -m venv --system-site-packages). Where there are no modules,
# the environment stays as it is.
if type module >/dev/null 2>&1; then
    module load frameworks
fi
