# Sourced by every job on Aurora: loads the module on which tokamake is installed.
# `frameworks` has Python and torch for the GPUs (ALCF user guide, Aurora, "PyTorch"). Load it before
# you create the venv of tokamake (python -m venv --system-site-packages). Without the command
# `module`, this does nothing.
if type module >/dev/null 2>&1; then
    module load frameworks
fi
