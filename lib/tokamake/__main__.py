"""`python -m tokamake` is `tokamake`, so that torchrun, mpiexec and srun can start it."""

from tokamake.cli import main

main()
