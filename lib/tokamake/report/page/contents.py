"""Results that the sections of the page show, read once from files."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from tokamake import files, results
from tokamake.config.data_set import DEFAULT, DataSet
from tokamake.config.resolved_run import Run, read_run
from tokamake.errors import UserError
from tokamake.report.page.figures import Figures
from tokamake.results.costs import costs
from tokamake.results.frames import run_folders
from tokamake.status.jobs import STARTS

MAX_RUNS = 40
"""Runs that a page shows."""


class PageContents:
    """Results of runs. A file that is damaged, or not written yet, costs its own part of the page.

    Attributes:
        results: the results folder.
        data_set: data folder that the runs share; None: of all runs.
        folders: folders of the runs, by name.
        faults: messages about runs that cannot be shown.

    Args:
        folders: results folders, or folders of single runs.
        data_set: keep the runs of this data folder alone.

    Raises:
        UserError: a folder does not exist.
    """

    def __init__(self, folders: Sequence[Path], *, data_set: str | None = None) -> None:
        self.faults: list[str] = []
        # The name of a run is the name of its folder.
        folders = [each if each.name not in ("", "..") else each.resolve() for each in folders]
        self.results = folders[0] if not (folders[0] / "run.yaml").exists() else folders[0].parent
        self.data_set = data_set
        self.figures = Figures()
        self._histories: dict[Path, pd.DataFrame] = {}
        wanted = [folder for folder in run_folders(folders) if self._is_wanted(folder)]
        newest = sorted(wanted, key=lambda folder: -(folder / "run.yaml").stat().st_mtime)
        chosen: dict[str, Path] = {}
        for folder in newest:
            if len(chosen) < MAX_RUNS and self._is_readable(folder, chosen.get(folder.name)):
                chosen[folder.name] = folder
        self.folders = dict(sorted(chosen.items()))
        if len(wanted) > MAX_RUNS:
            self.faults.append(
                f"{len(wanted):,} runs: the newest {MAX_RUNS} are shown; to see other runs, name "
                "their folders: tokamake report results/RUN..."
            )

    def _is_wanted(self, folder: Path) -> bool:
        try:
            data_sets = _named(results.runs(folder))["data_set"]
        except UserError as error:
            self.faults.append(str(error))
            return False
        return len(data_sets) > 0 and self.data_set in (None, *data_sets)

    def _is_readable(self, folder: Path, namesake: Path | None) -> bool:
        if namesake:
            self.faults.append(
                f"{folder}: the page shows {namesake}, a run of the same name; make a page for "
                f"each: tokamake report {folder}"
            )
            return False
        try:
            self._histories[folder] = results.metrics(folder)
        except UserError as error:
            self.faults.append(str(error))
            return False
        return True

    @cached_property
    def runs(self) -> pd.DataFrame:
        return _named(results.runs(*self.folders.values()))

    @cached_property
    def histories(self) -> dict[str, pd.DataFrame]:
        """Metrics of each run that has any, by step."""
        found = {name: self._histories[folder] for name, folder in self.folders.items()}
        return {name: history for name, history in found.items() if len(history)}

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        return results.evaluations(*self.folders.values())

    @cached_property
    def mixtures(self) -> pd.DataFrame:
        return results.mixtures(*self.folders.values())

    @cached_property
    def samples(self) -> pd.DataFrame:
        """Texts that the runs have written while they trained."""
        return results.samples(*self.folders.values())

    @cached_property
    def documents(self) -> pd.DataFrame:
        """Datasets of the data folders that the runs share."""
        found = results.documents(self.results)
        shown = {self.data_set} if self.data_set else {*self.runs["data_set"]}
        return found[found["data_set"].isin(shown)] if shown else found

    @cached_property
    def costs(self) -> pd.DataFrame:
        """Finished jobs of the runs and of their data folders."""
        found = costs(self.results)
        found = found.assign(data_set=found["data_set"].fillna(DEFAULT))
        shown = {self.data_set} if self.data_set else {*self.runs["data_set"]}
        # Runs of several data folders may share an initial model.
        is_shared = found["data_set"].isin(shown) | found["stage"].isin(STARTS)
        is_of_run = found["run"].isin([*self.folders])
        return found[is_of_run | (found["run"].isna() & (is_shared if shown else True))]

    @cached_property
    def settings(self) -> dict[str, Run]:
        """Settings of the runs, except for the ones of another version of tokamake."""
        found = {}
        for name, folder in self.folders.items():
            try:
                found[name] = read_run(folder / "run.yaml")
            except UserError as error:
                self.faults.append(str(error))
        return found

    @property
    def data_sets(self) -> dict[str, DataSet]:
        """Paths of each run's data folder."""
        named = zip(self.runs["run"], self.runs["data_set"], strict=True)
        return {run: DataSet(name) for run, name in named}

    def shared(self, path: str) -> Path:
        """A path of a `DataSet`, in the results folder of the page."""
        return self.results / Path(*Path(path).parts[1:])

    def read(self, run: str, path: str) -> Any:
        """A JSON file in the folder of a run; None: there is none."""
        return self.read_json(self.folders[run] / path)

    def read_json(self, path: Path, reader: Callable[[Path, str], Any] = files.read_json) -> Any:
        """A JSON file; None: there is none, or it is damaged, which `faults` says."""
        if not path.is_file():
            return None
        try:
            return reader(path, "rerun the workflow")
        except UserError as error:
            self.faults.append(str(error))
            return None


def _named(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with names of data folders, also of a results folder that is not here."""
    names = runs["data_set"].fillna(DEFAULT)
    inside = names.str.extract(r"(?:^|/)results/data(?:/([^/]+))?/?$")[0]
    is_path = names.str.contains("/")
    return runs.assign(data_set=inside.fillna(DEFAULT).where(is_path, names).astype("string"))
