"""Training jobs of earlier controllers that a batch system may still run."""

import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError

if TYPE_CHECKING:
    from snakemake_executor_plugin_pbs.base.records import Records


def runs_in_training(runs: Collection[str]) -> list[str]:
    """Runs whose training an earlier controller submitted, and whose end no controller has seen."""
    if find_spec("snakemake_executor_plugin_pbs") is None:
        return []  # a package of its own; without it, there are no jobs
    from snakemake_executor_plugin_pbs.base.records import Records

    training: set[str] = set()
    for folder in (Path(".snakemake/pbs"), Path(".snakemake/slurm")):
        if folder.is_dir():  # a dry run must not make it
            training |= _trained_by(Records(folder))
    return [run for run in runs if run in training]


def _trained_by(records: "Records") -> set[str]:
    try:
        submitted = list(records.load())
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{records.folder}: a record.json is damaged ({error}); delete it"
        ) from None
    running = (
        record
        for record in submitted
        if not record.cancelled and records.exit_status(record) is None
    )
    return {_run_of(Path(path)) for record in running for path in record.outputs}


def _run_of(output: Path) -> str:
    """Name of the run that a job with this output trains, or an empty string."""
    is_training = re.fullmatch(r"train(\.\d+)?\.json", output.name)
    return output.parent.name if is_training and output.parent.parent.name == "results" else ""
