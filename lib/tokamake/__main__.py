"""Entry point of `python -m tokamake`, for torchrun, mpiexec and srun."""

from tokamake.cli import main

main()
