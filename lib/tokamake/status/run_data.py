"""The data that a run was trained on: its data set, and whether it has been replaced since."""

from contextlib import suppress
from pathlib import Path

from tokamake import files
from tokamake.config.data_set import DataSet, data_set_in
from tokamake.config.resolved_run import read_run
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import manifest_path
from tokamake.errors import UserError


def data_set_of(folder: Path, run: str) -> DataSet:
    """The data set of a run: that of its run.yaml, or before there is one, that of its weights.

    Args:
        folder: working directory of the workflow.
        run: name of the run.
    """
    with suppress(UserError):  # there is no run.yaml yet
        resolved = read_run(folder / f"results/{run}/run.yaml")
        return data_set_in(str(resolved.data_root)) or DataSet()
    weights = folder.glob(f"{DataSet().folder}/*/{run}.weights.txt")
    return next((DataSet(path.parent.name) for path in weights), DataSet())


def replaced_datasets(folder: Path, run: str) -> list[str]:
    """Prefixes of the datasets that have other content now than the run's sample index names.

    Args:
        folder: working directory of the workflow.
        run: name of the run.
    """
    index = folder / f"results/{run}/index/index.json"
    if not index.is_file():
        return []
    indexed_at = index.stat().st_mtime_ns
    data = folder / data_set_of(folder, run).folder
    replaced = []
    for prefix, pair in files.read_json(index, "rerun the workflow").get("pairs", {}).items():
        path = manifest_path(data / prefix)
        # Manifests that are older than the index are not read: there may be thousands.
        if path.is_file() and path.stat().st_mtime_ns > indexed_at:
            with suppress(UserError):  # damaged: the workflow writes it again
                if read_manifest(data / prefix)["sha256"] != pair["sha256"]:
                    replaced.append(prefix)
    return replaced
