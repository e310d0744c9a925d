"""Neighbors of the samples of objective retro, as functions for rules.

Wildcards: `run`; `split`; `dataset`, a merged dataset; `chunk_length`; `embedder`, the name of a
model that embeds chunks. Runs with the same chunks and the same embedder share vectors.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokamake import files
from tokamake.checkpoint.detect import list_files, open_any
from tokamake.config.data_set import RUN
from tokamake.config.objective import objective_section
from tokamake.config.retrieval import FaissSettings
from tokamake.data.tokenizers import tokenizer_files
from tokamake.errors import naming
from tokamake.models.biencoder.hf import vector_width
from tokamake.preflight.data import held_out_splits
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.retro import check_embedder, check_faiss
from tokamake.retrieval.chunk_tables import num_chunks_of
from tokamake.retrieval.faiss_index import num_centroids
from tokamake.retrieval.planned_search import check_factory
from tokamake.workflow.exit import exit_on_user_error
from tokamake.workflow.options import options
from tokamake.workflow.snakemake_internals import check_braces

RULES = ("chunk_documents", "embed_chunks", "embed_samples", "index_chunks", "find_neighbors")
"""Rules of a config with a run of objective retro."""

OBJECTIVE = "retro"


class RetroRules:
    """Chunks, their vectors and index, and the neighbors of all samples of each run."""

    def __init__(self, config: WorkflowConfig) -> None:
        self._config = config
        self._sections = {
            name: objective_section(run.train)
            for name, run in config.runs.items()
            if run.train.objective == OBJECTIVE
        }
        self._reported = set[str]()
        self._embedders = {_embedder_name(each): each for each in self._sections.values()}
        self._batches = {
            name: batch for batch, names in config.merge_batches.items() for name in names
        }

    def check(self) -> None:
        """Refuse models that embed no chunks, before any job runs."""
        for name, section in self._sections.items():
            where = f"{self._config.named_runs[name].where}: train.retro"
            check_embedder(section.embedder, section.embedder_tokenizer, where=where)
            paths = (section.embedder, section.embedder_tokenizer)
            check_braces([path for path in paths if path], where)

    def check_index(self, run: str) -> None:
        """Refuse an index that FAISS does not know, or that vectors of the embedder do not fit."""
        section, where = self._sections[run], self._config.named_runs[run].where
        given = {
            name: getattr(section, name) for name in FaissSettings.model_fields if name != "seed"
        }
        shape = open_any(section.embedder).architecture
        width = vector_width(shape) if shape.has_towers else shape.hidden_size
        with naming(where):
            check_faiss()
            check_factory(FaissSettings(**given), dimension=width, section="train.retro")
        self._report_few_chunks(run)

    def _report_few_chunks(self, run: str) -> None:
        """Say that the chunks on disk are too few. This refuses nothing: documents may be added."""
        tables = [Path(path) for path in self.tables(SimpleNamespace(run=run))]
        if run in self._reported or not all(path.is_file() for path in tables):
            return
        self._reported.add(run)
        section, number = self._sections[run], sum(map(num_chunks_of, tables))
        needs = {"num_found": section.num_found, "factory": num_centroids(section.factory)}
        for name, needed in needs.items():
            if needed > number:
                print(
                    f"tokamake: run {run}: train.retro.{name}: {getattr(section, name)}: needs "
                    f"{needed:,} chunks, {number:,} exist so far; change it, or add documents",
                    file=sys.stderr,
                )

    @property
    def names(self) -> list[str]:
        """Runs with neighbors."""
        return [*self._sections]

    @property
    def chunk_lengths(self) -> list[str]:
        """Lengths of chunks of all runs."""
        return list(dict.fromkeys(str(each.chunk_length) for each in self._sections.values()))

    @property
    def embedders(self) -> list[str]:
        """Names of the models that embed chunks."""
        return [*self._embedders]

    @property
    def splits(self) -> list[str]:
        """Names of the splits of all runs."""
        return list(dict.fromkeys(split for run in self.names for split in self._splits(run)))

    # ---- Chunks of datasets, which runs share ----

    def merged_file(self, wildcards: Any) -> str:
        """Batch file of a dataset."""
        return self._config.data_set.batch_file("merge", self._batches[wildcards.dataset])

    def prefix(self, wildcards: Any) -> str:
        """Prefix of a dataset."""
        return f"{self._config.data_set.folder}/merged/{wildcards.dataset}"

    def vectors(self, wildcards: Any) -> str:
        """Folder of the vectors of a dataset's chunks."""
        folder = f"{self._config.data_set.chunks}/{wildcards.chunk_length}/{wildcards.embedder}"
        return f"{folder}/{wildcards.dataset}"

    def tables(self, wildcards: Any) -> list[str]:
        """Manifests of the chunks of all datasets that a run is trained on."""
        folder = self.table_folder(wildcards)
        return [f"{folder}/{name}.json" for name in self._datasets(wildcards.run, trained=True)]

    def embedded(self, wildcards: Any) -> list[str]:
        """Files that exist once the chunks of all these datasets are embedded."""
        folder = self.vector_folder(wildcards)
        return [f"{folder}/{name}.done" for name in self._datasets(wildcards.run, trained=True)]

    def table_folder(self, wildcards: Any) -> str:
        """Folder of the chunks of a run."""
        length = self._sections[wildcards.run].chunk_length
        return f"{self._config.data_set.chunks}/{length}"

    def vector_folder(self, wildcards: Any) -> str:
        """Folder of the vectors of these chunks."""
        return f"{self.table_folder(wildcards)}/{_embedder_name(self._sections[wildcards.run])}"

    # ---- The model that embeds chunks ----

    def _section(self, wildcards: Any) -> Any:
        if name := getattr(wildcards, "embedder", None):
            return self._embedders[name]
        return self._sections[wildcards.run]

    @exit_on_user_error()
    def embedder_files(self, wildcards: Any) -> list[str]:
        """Files of the model that embeds chunks, and of its tokenizer if the config names one."""
        section = self._section(wildcards)
        tokenizer = section.embedder_tokenizer
        return [
            *map(str, list_files(section.embedder)),
            *map(str, tokenizer_files(tokenizer)[1] if tokenizer else ()),
        ]

    def embedder_options(self, wildcards: Any) -> list[str]:
        """The same, as options."""
        section = self._section(wildcards)
        tokenizer = section.embedder_tokenizer
        given = [f"--checkpoint-tokenizer={tokenizer}"] if tokenizer else []
        return [f"--checkpoint={section.embedder}", *given]

    def batch_size(self, wildcards: Any, output: Any) -> int:  # noqa: ARG002
        """Chunks per forward pass; a function of the output reruns no finished job."""
        return int(self._section(wildcards).batch_size)

    # ---- Neighbors of a run ----

    def _splits(self, run: str) -> list[str]:
        """Splits of the index of a run."""
        train = self._config.runs[run].train
        if not train.evaluation_steps:
            return ["train"]
        held_out = held_out_splits(train, self._config.tables[run])
        return ["train", *(name for name in held_out if name != "test")]

    def _datasets(self, run: str, *, trained: bool) -> list[str]:
        """Merged datasets of a run.

        Args:
            trained: leave out corpora that no training sample comes from.
        """
        rows = self._config.tables[run]
        corpora = {row.corpus for row in rows if row.trains or not trained}
        return [merge.name for merge in self._config.plan.merged if merge.corpus in corpora]

    def asked(self, wildcards: Any) -> str:
        """Folder of the vectors of the chunks of a split's samples from a dataset."""
        folder = f"{RUN.format(run=wildcards.run)}/neighbors/asked/{wildcards.split}"
        return f"{folder}/{wildcards.dataset}"

    def index_options(self, wildcards: Any) -> list[str]:
        """The index of the chunks, as options of `index-chunks`."""
        section = self._sections[wildcards.run]
        seed = self._config.runs[wildcards.run].seed
        return [*options(section, only=("factory", "train_vectors", "num_found")), f"--seed={seed}"]

    def search_options(self, wildcards: Any) -> list[str]:
        """How neighbors are found, as options of `find-neighbors`."""
        section = self._sections[wildcards.run]
        return options(section, only=("num_found", "num_kept", "nprobe", "ef_search"))

    def neighbors(self, wildcards: Any) -> list[str]:
        """Manifests of the neighbors of all samples of a run; none for other objectives."""
        if wildcards.run not in self._sections:
            return []
        folder = f"{RUN.format(run=wildcards.run)}/neighbors"
        return [
            f"{folder}/{split}/{name}.json"
            for split in self._splits(wildcards.run)
            for name in self._datasets(wildcards.run, trained=False)
        ]

    # ---- Evaluation and generation, which search in the index of the training ----

    def retrieved_inputs(self, wildcards: Any) -> list[str]:
        """Index of a run and files of its embedder; none for other objectives."""
        if wildcards.run not in self._sections:
            return []
        return [f"{RUN}/neighbors/chunks.json", *self.embedder_files(wildcards)]

    def retrieval_options(self, wildcards: Any, *, data_root: str | None = None) -> list[str]:
        """Place of a run's neighbors, as options; none for other objectives.

        Args:
            data_root: folder of the datasets; None: no option names it.
        """
        section = self._sections.get(wildcards.run)
        if section is None:
            return []
        chunks = f"{RUN.format(run=wildcards.run)}/neighbors/chunks.json"
        searched = [f"--chunks={chunks}", f"--embedder={section.embedder}"]
        if section.embedder_tokenizer:
            searched.append(f"--embedder-tokenizer={section.embedder_tokenizer}")
        searched.append(f"--num-neighbors={section.neighbors}")
        searched += options(section, only=("retrieved_chunks", "nprobe", "ef_search"))
        return [*searched, *([f"--data-root={data_root}"] if data_root else [])]

    # ---- Targets ----

    def outputs_for_all_runs(self, outputs: list[str]) -> list[str]:
        """Files that a rule makes for all runs."""
        found = {
            output.format(
                run=run,
                split=split,
                dataset=dataset,
                chunk_length=section.chunk_length,
                embedder=_embedder_name(section),
            )
            for output in outputs
            for run, section in self._sections.items()
            for split in self._splits(run)
            for dataset in self._datasets(run, trained="{run}" not in output)
        }
        return sorted(found)


def _embedder_name(section: Any) -> str:
    """Name of an embedder: a hash of its path and of its tokenizer's."""
    if section.embedder is None:
        return ""
    paths = [str(section.embedder), str(section.embedder_tokenizer or "")]
    return f"{Path(section.embedder).name[:40]}-{files.digest(paths)[:8]}"
