"""Ranks under every launcher."""

from types import SimpleNamespace

import pytest

from tokamake.errors import UserError
from tokamake.runtime import ranks
from tokamake.runtime.ranks import Ranks

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("environment", [TORCHRUN, DEEPSPEED, OPEN_MPI, MPICH, PALS, SRUN])
def test_ranks_are_read_under_each_launcher(environment: dict[str, str]) -> None:
    assert Ranks.find(environment) == Ranks(rank=3, world_size=4, local_rank=1, local_size=2)


def test_mpi_is_used_if_only_the_rank_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        rank, size = 3, 4

        def Split_type(self, kind: str) -> SimpleNamespace:
            assert kind == "shared"
            return SimpleNamespace(rank=1, size=2)

    mpi = SimpleNamespace(COMM_WORLD=World(), COMM_TYPE_SHARED="shared")
    monkeypatch.setattr(ranks, "mpi", lambda: mpi)
    assert Ranks.find({"PMIX_RANK": "3"}) == Ranks(3, 4, 1, 2)


@pytest.mark.parametrize("environment", [{}, SBATCH])
def test_a_single_process_has_no_launcher(environment: dict[str, str]) -> None:
    assert Ranks.find(environment) == Ranks(rank=0, world_size=1, local_rank=0, local_size=1)


def test_mpiexec_inside_a_slurm_step_counts_its_own_ranks() -> None:
    proxy = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert Ranks.find({**proxy, **MPICH}).rank == 3


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "many"), ("RANK", "4")])
def test_broken_variables_are_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name}={value}"):
        Ranks.find({**TORCHRUN, name: value})
