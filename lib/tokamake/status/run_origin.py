"""Origin of a run: its data set, whether this has been replaced, and its parent."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tokamake import files
from tokamake.config.data_set import DataSet
from tokamake.config.resolved_run import read_run
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import manifest_path
from tokamake.errors import UserError
from tokamake.status.jobs import data_set_of


class Origin(NamedTuple):
    """Data set and parent of a run."""

    data_set: str
    replaced: list[str]
    """Datasets that have been written with other content since the run was indexed."""
    parent: str | None
    """Run of the same table that it starts from."""


def read_origin(folder: Path, run: str) -> Origin:
    parent = None
    with suppress(UserError):  # there is no run.yaml yet
        parent = read_run(folder / f"results/{run}/run.yaml").parent
    data_set = data_set_of(folder, run)
    return Origin(data_set.name, _replaced_datasets(folder, run, data_set=data_set), parent)


def _replaced_datasets(folder: Path, run: str, *, data_set: DataSet) -> list[str]:
    """Prefixes of the datasets that have other content than the run's sample index names."""
    index = folder / f"results/{run}/index/index.json"
    if not index.is_file():
        return []
    indexed_at, data = index.stat().st_mtime_ns, folder / data_set.folder
    replaced = []
    for prefix, pair in files.read_json(index, "rerun the workflow").get("pairs", {}).items():
        path = manifest_path(data / prefix)
        # Manifests that are older than the index are not read: there may be thousands.
        if path.is_file() and path.stat().st_mtime_ns > indexed_at:
            with suppress(UserError):  # damaged: the workflow writes it again
                if read_manifest(data / prefix)["sha256"] != pair["sha256"]:
                    replaced.append(prefix)
    return replaced
