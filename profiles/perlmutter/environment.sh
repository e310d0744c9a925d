# Sourced by every job on Perlmutter: loads the module on which tokamake is installed.
# `pytorch` has Python, torch for the GPUs and NCCL's plug-in for the network (NERSC documentation,
# Machine learning, "PyTorch"). Load it before you create the venv of tokamake (python -m venv
# --system-site-packages). Without the command `module`, this does nothing.
if type module >/dev/null 2>&1; then
    module load pytorch
fi
