"""Which checkpoints runs start from, and which they are converted to."""

import os
import re
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.detect import list_files
from tokamake.checkpoint.native.folder import find as find_native
from tokamake.config.architecture_files import architecture_file
from tokamake.config.data_set import RUN
from tokamake.config.model import formats_with_tokenizer, parse_export_format
from tokamake.data.corpus.corpora import Corpus
from tokamake.errors import UserError
from tokamake.preflight.planned import WorkflowConfig
from tokamake.remote.addresses import RemoteFile
from tokamake.remote.hub import repository_of
from tokamake.remote.hub_models import unfetched
from tokamake.workflow.exit import exit_on_user_error


class CheckpointRules:
    """Input functions and options of rules about checkpoints.

    Wildcards are `run`, `start` (name of an initial checkpoint) and `form` (an export format). Runs
    that start from the same checkpoint share its conversion.
    """

    def __init__(self, config: WorkflowConfig) -> None:
        self._config = config
        folders = {run: each.model.folder for run, each in config.all_runs.items()}
        self._name = {run: _name_of(folder) for run, folder in folders.items() if folder}
        self.starts = {self._name[run]: str(folder) for run, folder in folders.items() if folder}
        """Folder of each initial checkpoint that exists before any run is trained, by name."""
        self._weights = {name: unfetched(Path(path)) for name, path in self.starts.items()}
        """Weights of the initial checkpoints that are still to be downloaded."""
        self.files = {name: self._files_of(name) for name in self.starts}
        """Files of each initial checkpoint, also files to download."""
        self._native = {name for name, path in self.starts.items() if find_native(Path(path))}
        self.imported = [
            f"results/import/{name}" for name in self.starts if name not in self._native
        ]
        """Initial checkpoints that are converted to the native format."""
        self.exported = [
            f"results/{run}/convert/{form}"
            for run in config.runs
            for form in config.runs[run].convert
        ]
        """Trained models in the formats that the config asks for."""
        self.pushed = [
            f"results/{run}/push.json" for run in config.runs if config.runs[run].export.push
        ]
        """Files that name the commits of uploaded models."""
        self.addresses = {
            file.path: file.url for weights in self._weights.values() for file in weights
        }
        """Address of each file that `fetch_weights` downloads, by its path."""

    @property
    def missing_weights(self) -> list[RemoteFile]:
        """Weights to download for checkpoints that are not converted yet."""
        starts = [name for name in self._weights if not Path(f"results/import/{name}").exists()]
        return [file for name in starts for file in self._weights[name]]

    def _files_of(self, start: str) -> list[str]:
        checkpoint = Path(self.starts[start])
        existing = list_files(checkpoint) or [checkpoint / "config.json"]
        missing = (Path(file.path) for file in self._weights[start])
        return [str(existing[0]), *map(str, sorted({*existing[1:], *missing}))]

    def _native_folder(self, run: str) -> str | None:
        """Folder of the native checkpoint that a run starts from; None: random weights.

        A native checkpoint is read in place.
        """
        if parent := self._config.all_runs[run].model.parent:
            is_finetuned = parent in self._config.finetuned
            return f"{RUN.format(run=parent)}/{'finetuned' if is_finetuned else 'training'}"
        if (name := self._name.get(run)) is None:
            return None
        return self.starts[name] if name in self._native else f"results/import/{name}"

    @exit_on_user_error()
    def initial_folder(self, wildcards: Any) -> str:
        """The native checkpoint that a run starts from."""
        if (folder := self._native_folder(wildcards.run)) is None:
            raise UserError(
                f"run {wildcards.run}: starts from random weights, which are not evaluated; name a "
                "checkpoint in model.checkpoint"
            )
        return folder

    def start_options(self, wildcards: Any) -> list[str]:
        """The native checkpoint that a run starts from, as an option of `resolve`.

        The architecture is here, too, if its name has settings: Snakemake compares these params. A
        task without a head may start the towers of a biencoder from a BERT.
        """
        folder, stated = self._native_folder(wildcards.run), self._stated(wildcards)
        options = [f"--checkpoint={folder}"] if folder else []
        has_settings = stated and architecture_file(stated) != stated
        finetune = self._config.all_runs[wildcards.run].finetune
        has_own_shape = stated and finetune and finetune.task.head == "none"
        return [*options, f"--architecture={stated}"] if has_settings or has_own_shape else options

    def _stated(self, wildcards: Any) -> Path | None:
        return self._config.all_runs[wildcards.run].model.stated

    def start_inputs(self, wildcards: Any) -> list[str] | str:
        """The native checkpoint that a run starts from, as files.

        Another run of the table has its last checkpoint once its train.json exists, or its best one
        once its finetune.json does.
        """
        if parent := self._config.all_runs[wildcards.run].model.parent:
            is_finetuned = parent in self._config.finetuned
            return f"{RUN.format(run=parent)}/{'finetune' if is_finetuned else 'train'}.json"
        name = self._name.get(wildcards.run)
        if name in self._native:
            return self.files[name]
        return self._native_folder(wildcards.run) or []

    def stated_architecture(self, wildcards: Any) -> list[Path]:
        """File of the architecture, of a new model or to compare a checkpoint with, if any."""
        stated = self._stated(wildcards)
        return [architecture_file(stated)] if stated else []

    def model_options(self, wildcards: Any, input: Any) -> list[str]:
        """Stated architecture, and the run of the table to start from, as options of `resolve`.

        Snakemake compares inputs, and no params that are functions of them: these options alone
        resolve nothing again.
        """
        parent = self._config.runs[wildcards.run].model.parent
        plain = [path for path in input.architecture if Path(path) == self._stated(wildcards)]
        stated = [f"--architecture={path}" for path in plain]
        return [*stated, f"--parent={parent}"] if parent else stated

    def _origin(self, run: str) -> Path | None:
        """Checkpoint that a run, or its first parent, started from; None: random weights."""
        while (parent := self._config.runs[run].model.parent) is not None:
            run = parent
        return self._config.runs[run].model.folder

    def card_options(self, wildcards: Any) -> list[str]:
        """Where the data and the initial weights of a run are from, and its licence."""
        run = self._config.runs[wildcards.run]
        rows = self._config.tables[wildcards.run]
        origin = self._origin(wildcards.run)
        base_model = repository_of(origin) if origin else None
        return [
            *(f"--files={row.corpus}={_shown_files(row)}" for row in rows),
            *([f"--base-model={base_model}"] if base_model else []),
            *([f"--license={run.export.license}"] if run.export.license else []),
        ]

    def generation_options(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Generation config of the checkpoint that a run, or its first parent, started from.

        As a function of the output, it does not make finished exports run again.
        """
        folder = self._origin(wildcards.run)
        has_one = folder is not None and (folder / "generation_config.json").is_file()
        return [f"--generation-config={folder}"] if has_one else []

    @exit_on_user_error()
    def export_options(self, wildcards: Any, input: Any) -> list[str]:
        """An export format as options of `convert`."""
        try:
            form = parse_export_format(wildcards.form)
        except ValueError as error:
            folder = RUN.format(run=wildcards.run)
            raise UserError(f"{folder}/convert/{wildcards.form}: {error}") from None
        sizes = [f"--{size.replace('_', '-')}={number}" for size, number in form.sizes.items()]
        dtype = [f"--dtype={form.dtype}"] if form.dtype else []
        tokenizer = (
            [f"--tokenizer={input.tokenizer[0]}"] if form.format in formats_with_tokenizer() else []
        )
        return [f"--format={form.format}", *sizes, *dtype, *tokenizer]


def _name_of(folder: Path) -> str:
    """Name of an initial checkpoint: its folder's name, and a hash of the path."""
    path = os.path.normpath(folder)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).name)
    return f"{name}-{files.digest(path)[:8]}"


def _shown_files(corpus: Corpus) -> str:
    """Files of a corpus, for a model card; a list of thousands is named after its file."""
    return corpus.where.rpartition(":")[0] if corpus.listed else corpus.files
