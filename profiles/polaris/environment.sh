# Sourced by every job on Polaris: loads the module on which tokamake is installed.
# `conda` has Python and torch for the GPUs (ALCF user guide, Polaris, "Python"). Activate it before
# you create the venv of tokamake (python -m venv --system-site-packages). Without the command
# `module`, this does nothing.
if type module >/dev/null 2>&1; then
    module use /soft/modulefiles
    module load conda
    conda activate
fi
