# Sourced by every job on Polaris: what tokamake's Python was installed on.
# `conda` has Python and torch for the GPUs (ALCF user guide, Polaris, "Python"); install tokamake in a
# venv made after activating it (python -m venv --system-site-packages). Where there are no modules,
# the environment stays as it is.
if type module >/dev/null 2>&1; then
    module use /soft/modulefiles
    module load conda
    conda activate
fi
