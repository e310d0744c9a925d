"""Rank and world size, from variables of the launcher or from MPI.

torchrun, deepspeed, srun and mpiexec (MPICH, Intel MPI, PALS, Open MPI) set environment variables.
mpi4py is imported only if these are not sufficient.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokamake.errors import UserError

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun; deepspeed has LOCAL_SIZE
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),  # HPE PALS
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("PMIX_RANK", "PMIX_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
"""Variables of rank, world size, local rank and local size; the first complete set is used."""

_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
"""Only srun sets all of these. A batch script has SLURM_PROCID and SLURM_NTASKS, too, but is not a
rank."""


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process, in the run and on its host."""

    rank: int
    """Number of this process, 0 to world_size - 1."""
    world_size: int
    """Number of processes of the run."""
    local_rank: int
    """Number of this process on its host."""
    local_size: int
    """Number of processes on this host."""

    def print_once(self, line: str) -> None:
        """Print a line on rank 0 only."""
        if self.rank == 0:
            print(line, flush=True)

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "Ranks":
        """Read the launcher's variables; if they are incomplete, use MPI.

        Raises:
            UserError: a variable is not a number, or the rank is not below the world size.
        """
        candidates = [
            names
            for names in (*_LAUNCHERS, _SLURM)
            if names[0] in environment and (names[1] in environment or names[0] == "PMIX_RANK")
        ]
        if not candidates:
            return ALONE
        # Several launchers set PMI_RANK; they differ in the variable of the local rank.
        complete = (names for names in candidates if names[2] in environment)
        return cls._read(environment, next(complete, candidates[0]))

    @classmethod
    def _read(cls, environment: Mapping[str, str], names: tuple[str, ...]) -> "Ranks":
        rank, world_size, local_rank, local_size = (variable(environment, name) for name in names)
        if world_size is None or (world_size > 1 and local_rank is None):
            return cls._ask_mpi()
        if rank is None or not 0 <= rank < world_size:
            raise UserError(
                f"{names[0]}={rank}, {names[1]}={world_size}: no such rank; "
                "unset both or start through torchrun, mpiexec or srun"
            )
        local_size = local_size or variable(environment, "LOCAL_SIZE")
        return cls(rank, world_size, local_rank or 0, local_size or 1)

    @classmethod
    def _ask_mpi(cls) -> "Ranks":
        module = mpi()
        world = module.COMM_WORLD
        local = world.Split_type(module.COMM_TYPE_SHARED)
        return cls(world.rank, world.size, local.rank, local.size)


def variable(environment: Mapping[str, str], name: str) -> int | None:
    """Value of a launcher's variable; None if it is not set."""
    value = environment.get(name)
    if value is None:
        return None
    # Slurm writes "4(x2),3" for two hosts of four tasks and one of three.
    digits = re.fullmatch(r"(\d+)(\(x\d+\))?(,.*)?", value.strip())
    if not digits:
        raise UserError(f"{name}={value}: not a number; unset it or start through a launcher")
    return int(digits[1])


def mpi() -> Any:
    """Import `mpi4py.MPI`, which initializes MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"mpi4py: {reason}; load the MPI of this launcher, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    return MPI


ALONE = Ranks(rank=0, world_size=1, local_rank=0, local_size=1)
"""A process without other ranks."""
