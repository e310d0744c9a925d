"""Paths of data folders."""

import pytest

from tokamake.config.data_set import DEFAULT, DataSet, data_set_in

PATHS = ("shared", "logs", "benchmarks", "tokenizer", "plan", "settings", "metadata", "weights")


def paths(data_set: DataSet) -> list[str]:
    return [*(getattr(data_set, name) for name in PATHS), data_set.batch_file("merge", "web-0")]


def test_the_default_data_set_has_the_paths_of_a_workflow_with_one() -> None:
    assert paths(DataSet()) == [
        "results", "logs", "results/benchmarks", "results/tokenizer", "results/data/plan.json",
        "results/data/data_set.json", "results/data/metadata.json",
        "results/data/{run}.weights.txt", "results/data/batches/merge/web-0.json",
    ]  # fmt: skip


def test_all_paths_of_two_data_sets_differ() -> None:
    sets = [paths(DataSet(name)) for name in (DEFAULT, "a", "b")]
    assert len({path for each in sets for path in each}) == 3 * len(sets[0])
    assert all("/a" in path for path in sets[1])


@pytest.mark.parametrize("name", [DEFAULT, "gpt2"])
def test_a_folder_names_its_data_set(name: str) -> None:
    assert data_set_in(DataSet(name).folder) == DataSet(name)
    assert data_set_in(f"{DataSet(name).folder}/") == DataSet(name)


@pytest.mark.parametrize("folder", ["results", "/scratch/data", "results/data/a/merged", "data"])
def test_other_folders_are_no_data_set(folder: str) -> None:
    assert data_set_in(folder) is None
