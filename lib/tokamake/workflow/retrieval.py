"""Search with the biencoders of the runs, as functions for rules.

Wildcards: `run`; `shard`, embeddings of a file of passages, of a byte range of it, or of a dataset;
`questions`, a file of them; `searched`, the folder of the searches of a run, or of BM25.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tokamake import files
from tokamake.config.architecture_files import read_architecture
from tokamake.config.data_set import RUN
from tokamake.config.objective import objective_data, objective_section
from tokamake.config.retrieval import RetrievalSettings
from tokamake.config.root import Config
from tokamake.data.corpus.raw_files import expand
from tokamake.errors import UserError, naming
from tokamake.models.biencoder.hf import vector_width
from tokamake.preflight.planned import WorkflowConfig
from tokamake.retrieval.evidence import cut_passages
from tokamake.retrieval.planned_search import check_passages, check_questions
from tokamake.workflow.exit import exit_on_user_error
from tokamake.workflow.options import options
from tokamake.workflow.snakemake_internals import check_braces

RULES = (
    *("embed_passages", "embed_blocks", "embed_questions", "index_blocks", "search", "search_bm25"),
    *("evaluate_retrieval", "retrieval"),
)
"""Rules of a config with the section `retrieval`."""

_MAX_FILES, _MAX_SHARDS = 500, 1000
"""Files of passages, and shards; their names must fit into a command, which has 128 KB."""
_FOLDER = f"{RUN}/retrieval"


class PassageShard(NamedTuple):
    """Passages that a job embeds."""

    path: Path
    byte_range: str
    """START:END; empty: the whole file."""


class RetrievalRules:
    """Embeddings, searches and recall of each run whose model gives texts vectors."""

    def __init__(self, config: WorkflowConfig, *, is_main_process: bool) -> None:
        self._config, self._is_main_process = config, is_main_process
        is_asked = config.shared.retrieval is not None
        self.names = [n for n, run in config.all_runs.items() if is_asked and _embeds(run)]
        """Runs whose models search."""
        self._blocks: dict[str, dict[str, str]] = {}
        self._searched = {_FOLDER.format(run=run): run for run in self.names}

    @property
    def settings(self) -> RetrievalSettings:
        """The section."""
        settings = self._config.shared.retrieval
        assert settings is not None, "rules ask for it in this case only"
        return settings

    @property
    def folders(self) -> list[str]:
        """Folders of searches; the wildcard `searched` is one of them."""
        return [*self._searched, self._config.data_set.bm25]

    @property
    def where(self) -> str:
        """Place of the section, for messages."""
        return f"{next(iter(self._config.named_runs.values())).where}: retrieval"

    def check(self) -> None:
        """Refuse a section that no run uses. Files are checked once a job needs them."""
        if self._config.shared.retrieval is None:
            return
        if not self.names:
            found = ", ".join(f"{name}: {_learned(r)}" for name, r in self._config.all_runs.items())
            raise UserError(
                f"{self.where}: no run trains a model that gives texts vectors ({found}); set "
                "train.objective to ict in one, or remove the section"
            )
        finetuned = [name for name in self.names if name in self._config.finetuned]
        if finetuned and not self.settings.passages:
            raise UserError(
                f"{self.where}: run {finetuned[0]} finetunes, and has no datasets whose blocks "
                "could be embedded; set passages and questions"
            )
        check_braces(self.settings.questions.values(), f"{self.where}.questions")

    # ---- Files ----

    @cached_property
    def passages(self) -> dict[str, PassageShard]:
        """Shards of passages by name: the file's, with a hash if it is twice, and with @NUMBER if
        the file is cut."""
        paths = self._passage_paths
        stems = [re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip(".") for path in paths]
        counts = Counter(stems)
        shards = dict[str, PassageShard]()
        for stem, path in zip(stems, paths, strict=True):
            is_unique = counts[stem] == 1 and stem
            name = stem if is_unique else f"{stem}-{files.digest(str(path))[:8]}"
            ranges = cut_passages(path, self.settings.shard_bytes)
            for number, byte_range in enumerate(ranges):
                shard = f"{name}@{number:05d}" if byte_range else name
                shards[shard] = PassageShard(path, byte_range)
        if len(shards) > _MAX_SHARDS:
            raise UserError(
                f"{self.where}: shard_bytes: {self.settings.shard_bytes:,}: cuts passages into "
                f"{len(shards):,} shards, each a job; raise it, so that there are at most "
                f"{_MAX_SHARDS:,}"
            )
        return shards

    @cached_property
    def _passage_paths(self) -> list[Path]:
        given = self.settings
        with naming(self.where), naming("passages"):
            paths = expand([*(given.passages or ())])
            if len(paths) > _MAX_FILES:
                raise UserError(
                    f"{len(paths):,} files; each is a job: join them into at most {_MAX_FILES}"
                )
            check_braces(paths, "files")
        if self._is_main_process:
            with naming(self.where):
                check_passages(paths, given)
                check_questions(given.questions, match=given.match)
        return paths

    def blocks(self, run: str) -> dict[str, str]:
        """Datasets of the texts of a run, each a shard, and the datasets of their titles or ''."""
        if run not in self._blocks:
            train, merged = self._config.runs[run].train, self._config.merged
            objective, section = objective_data(train.objective), objective_section(train)
            corpora = {row.corpus for row in self._config.tables[run]}
            names = [name for name, merge in merged.items() if merge.corpus in corpora]
            titles = {
                name: next((each for each in candidates if each in merged), "")
                for name, candidates in objective.companions(
                    objective.sample_settings(train), names
                ).items()
            }
            are_titles = {*titles.values()}
            self._blocks[run] = {
                name: titles.get(name, "")
                for name in names
                if merged[name].key in ("", section.text) and name not in are_titles
            }
        return self._blocks[run]

    @exit_on_user_error()
    def _shards(self, run: str) -> list[str]:
        """Names of the shards of a run's embeddings."""
        return [*(self.passages if self.settings.passages else self.blocks(run))]

    def shards(self, wildcards: Any) -> list[str]:
        """Manifests of the embeddings of a run."""
        folder = self.embeddings(wildcards)
        return [f"{folder}/{name}.json" for name in self._shards(wildcards.run)]

    def embeddings(self, wildcards: Any) -> str:
        """Folder of the embeddings of a run."""
        return f"{_FOLDER.format(run=wildcards.run)}/embeddings"

    def shard_options(self, wildcards: Any) -> list[str]:
        """These shards as options: the folder may have others, of files that were removed."""
        return [f"--shards={name}" for name in self._shards(wildcards.run)]

    @exit_on_user_error()
    def passage_file(self, wildcards: Any) -> str:
        """File of passages of a shard."""
        shard = self.passages.get(wildcards.shard)
        return str(shard.path) if shard else ""

    @exit_on_user_error()
    def byte_range_options(self, wildcards: Any) -> list[str]:
        """Byte range of a shard, as an option; none: the whole file."""
        shard = self.passages.get(wildcards.shard)
        return [f"--byte-range={shard.byte_range}"] if shard and shard.byte_range else []

    @exit_on_user_error()
    def passage_files(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """All files of passages."""
        return [*map(str, self._passage_paths)]

    def question_file(self, wildcards: Any) -> str:
        """A file of questions."""
        return str(self.settings.questions[wildcards.questions])

    @exit_on_user_error()
    def merged_files(self, wildcards: Any) -> list[str]:
        """Batch files of the dataset of a shard of blocks, and of its titles."""
        read = {wildcards.shard, self.blocks(wildcards.run).get(wildcards.shard)}
        return [
            self._config.data_set.batch_file("merge", batch)
            for batch, names in self._config.merge_batches.items()
            if read & {*names}
        ]

    def prefix(self, wildcards: Any) -> str:
        """Dataset of a shard of blocks."""
        return f"{self._config.data_set.folder}/merged/{wildcards.shard}"

    # ---- Model ----

    def model_inputs(self, wildcards: Any) -> str:
        """File that exists once the model is trained."""
        is_finetuned = wildcards.run in self._config.finetuned
        return f"{RUN}/finetune.json" if is_finetuned else f"{RUN}/train.json"

    def model(self, wildcards: Any) -> str:
        """Folder of the model of a run."""
        is_finetuned = wildcards.run in self._config.finetuned
        return f"{RUN.format(run=wildcards.run)}/{'finetuned' if is_finetuned else 'training'}"

    def sequence_length(self, wildcards: Any) -> int:
        """Most tokens of a text, as in training."""
        return self._config.all_runs[wildcards.run].train.sequence_length

    def batch_size(self, wildcards: Any, output: Any) -> int:  # noqa: ARG002
        """Texts per forward pass; a function of the output reruns no finished job."""
        return self.settings.batch_size

    def number(self, wildcards: Any) -> int:
        """Number of the dataset of a shard of blocks, for the ids."""
        return [*self.blocks(wildcards.run)].index(wildcards.shard)

    def dimension(self, run: str) -> int | None:
        """Width of the vectors of a run; None: its checkpoint decides."""
        model = self._config.all_runs[run].model
        if model.stated:
            return vector_width(read_architecture(model.stated))
        return self.dimension(model.parent) if model.parent else None

    # ---- Searches ----

    def index_options(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """The index as options of `index-blocks`."""
        index = self.settings.index
        assert index is not None, "the rule exists in this case only"
        return options(index, only=("factory", "train_vectors", "seed"))

    def index_file(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """Index of a run; none: the search is exact."""
        return [f"{_FOLDER}/index.json"] if self.settings.index else []

    def search_options(self, wildcards: Any, input: Any) -> list[str]:  # noqa: ARG002
        """How an index is searched."""
        index = self.settings.index
        given = options(index, only=("nprobe", "ef_search")) if index else []
        return [*(f"--index={path}" for path in input.index), *given]

    def recalls(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """Recall of a run on each file of questions."""
        return [f"{_FOLDER}/recall/{name}.json" for name in self.settings.questions]

    def bm25_recalls(self, wildcards: Any) -> list[str]:  # noqa: ARG002
        """Recall of BM25 on each file of questions."""
        folder, is_asked = self._config.data_set.bm25, self.settings.bm25
        return [f"{folder}/recall/{name}.json" for name in self.settings.questions if is_asked]

    def card_inputs(self, wildcards: Any) -> list[str]:
        """Recall that the model card of a run states."""
        if wildcards.run not in self.names:
            return []
        return [*self.recalls(wildcards), *self.bm25_recalls(wildcards)]

    def card_options(self, of_checkpoint: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
        """Function of a job: options of a model card, with the recall of its run."""

        def all_options(wildcards: Any) -> list[str]:
            paths = [path.format(run=wildcards.run) for path in self.card_inputs(wildcards)]
            bm25 = f"{self._config.data_set.bm25}/"
            kinds = ["bm25" if path.startswith(bm25) else "recall" for path in paths]
            recalls = [f"--{kind}={path}" for kind, path in zip(kinds, paths, strict=True)]
            return [*of_checkpoint(wildcards), *recalls]

        return all_options

    # ---- Targets ----

    @property
    def products(self) -> list[str]:
        """Last files of all runs: recalls, or the index or the embeddings of the blocks."""
        products = []
        for run in self.names:
            folder = _FOLDER.format(run=run)
            if self.settings.questions:
                wildcards = SimpleNamespace(run=run)
                found = [*self.recalls(wildcards), *self.bm25_recalls(wildcards)]
                products += [path.format(run=run) for path in found]
            elif self.settings.index:
                products.append(f"{folder}/index.json")
            else:
                products += [f"{folder}/embeddings/{name}.json" for name in self._shards(run)]
        return products

    def absent(self, rule: str) -> str:
        """The reason why a config has no such rule."""
        if self._config.shared.retrieval is None:
            return "this config searches nothing; give it the section retrieval"
        reasons = {
            "embed_blocks": "retrieval.passages are embedded in place of blocks of datasets",
            "index_blocks": "retrieval.index is empty, so the search is exact",
            "search_bm25": "retrieval.bm25 is false, or there are no questions",
        }
        return reasons.get(rule, "retrieval has no passages and no questions")

    def outputs_for_all_runs(self, rule: str, outputs: list[str]) -> list[str]:
        """Files that a rule makes for all runs, questions and shards."""
        folders = [self._config.data_set.bm25] if rule == "search_bm25" else self.folders
        found = {
            output.format(run=run, shard=shard, questions=questions, searched=folder)
            for output in outputs
            for run in self.names
            for shard in (self._shards(run) if "{shard}" in output else [""])
            for questions in (self.settings.questions if "{questions}" in output else [""])
            for folder in (folders if "{searched}" in output else [""])
        }
        return sorted(found)


def _embeds(run: Config) -> bool:
    name = run.finetune.task.objective if run.finetune else run.train.objective
    return objective_data(name).embeds


def _learned(run: Config) -> str:
    """Task or objective of a run, for a message."""
    return run.finetune.task.name if run.finetune else f"objective {run.train.objective}"
