# Sourced by every job on Perlmutter: what tokamake's Python was installed on.
# `pytorch` has Python, torch for the GPUs and NCCL's plug-in for the network (NERSC documentation, Machine
# learning, "PyTorch"); install tokamake in a venv made after loading it (python -m venv
# --system-site-packages). Where there are no modules, the environment stays as it is.
if type module >/dev/null 2>&1; then
    module load pytorch
fi
