"""The data of a run: facts are the config, or index.json and the headers of datasets."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.config.fields import split_fractions
from tokamake.config.objective import DEFAULT, objective_data, sample_settings
from tokamake.config.resolved_run import Run
from tokamake.config.training import INDEX_SETTINGS, TrainSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.splits import NAMES
from tokamake.data.indexed.check_dataset import check_foreign, stated_vocabulary
from tokamake.data.indexed.paths import bin_path, manifest_path
from tokamake.data.samples.sentence_masking import KEY
from tokamake.errors import UserError
from tokamake.preflight.model import check_sequence_length
from tokamake.preflight.planned import WorkflowConfig

IndexContent = dict[str, Any]
"""Content of an index folder's index.json."""


def check_planned_data(config: WorkflowConfig, name: str) -> None:
    """Check the objective of a run against its data and tokenizer, before any job runs.

    `index` and `train` check it again, with the datasets that then exist.
    """
    run = config.runs[name]
    objective = objective_data(run.train.objective)
    trained = [each for each in config.tables[name] if each.trains]
    if not all(corpus.is_indexed for corpus in trained):
        objective.check_tokenize(run.tokenize)
    for corpus in trained:
        objective.check_corpus(run.train, corpus)
    if objective.companion_key(run.train):
        _check_companions(config, name, corpora=trained)
    if config.given_tokenizer is None:
        objective.check_tokenizer(run.tokenizer)


def _check_companions(config: WorkflowConfig, name: str, *, corpora: Iterable[Corpus]) -> None:
    """Check files and existing datasets of a run whose objective reads two datasets together."""
    train = config.runs[name].train
    objective, rows = objective_data(train.objective), {each.corpus: each for each in corpora}
    files = {shard.corpus: Path(shard.files[0]) for shard in reversed(config.plan.shards)}
    for corpus, file in files.items():
        if corpus in rows and file.is_file():
            objective.check_first_texts(train, rows[corpus], file=file)
    existing = {
        each.name: Path(each.dataset)
        for each in config.plan.merged
        if each.dataset and each.corpus in rows
    }
    settings = objective.sample_settings(train)
    for prefix, names in objective.companions(settings, [*existing]).items():
        for companion in names:
            if companion in existing:
                objective.check_companion(existing[prefix], existing[companion])


def check_earlier_keys(config: WorkflowConfig) -> None:
    """Check that the keys of earlier data exist, which near-duplicates are compared with."""
    near = config.shared.tokenize.near_duplicates
    _, where = next(iter(config.named_runs.values()))
    for path in near.against if near else ():
        if not path.is_file():
            raise UserError(
                f"{where}: tokenize.near_duplicates.against: {path}: no such file; fix the path, "
                "or build the other data first: near_duplicates/*.keys in their folder"
            )


def check_index(run: Run, index: IndexContent) -> None:
    """Compare sequence length, index settings and number of samples with model and index."""
    train = run.train
    check_sequence_length(train, run.architecture)
    for name in INDEX_SETTINGS:
        setting = getattr(train, name)
        if index[name] != setting:
            raise UserError(
                f"{run.index}: has {name} {index[name]}, train.{name} is {setting}; "
                "run `tokamake index` again"
            )
    check_samples_objective(run, index)
    assert train.num_samples is not None, "a resolved run has a length"
    num_samples = num_training_samples(index)
    if num_samples < train.num_samples:
        raise UserError(
            f"{run.index}: has {num_samples} training samples, train.train_steps take "
            f"{train.num_samples}; run `tokamake index` again"
        )


def check_samples_objective(run: Run, index: IndexContent) -> None:
    """Compare the objective of the samples of an index, and their masking, with the run's."""
    train, remedy = run.train, "run `tokamake index` again"
    stated = index.get(KEY, {})
    name = stated.get("name", DEFAULT)
    if name != train.objective:
        raise UserError(
            f"{run.index}: has samples of objective {name}, train.objective is {train.objective}; "
            f"{remedy}"
        )
    for key, setting in sample_settings(train).items() if stated else ():
        if stated[key] != setting:
            raise UserError(
                f"{run.index}: has {key} {stated[key]}, the run's settings give {setting}; {remedy}"
            )


def num_training_samples(index: IndexContent) -> int:
    return index["splits"]["train"]["samples"] if "train" in index["splits"] else 0


def check_vocabulary(architecture: Architecture, index: IndexContent, *, data_root: Path) -> None:
    """Refuse tokens without a row in the embedding.

    The vocabulary in a dataset's manifest bounds its tokens. For other datasets, `index` notes the
    largest token; if an earlier version made the index, it is read from the dataset here.
    """
    assert architecture.vocab_size is not None
    embeddings = f"the model has {architecture.vocab_size} embeddings"
    largest_tokens = index.get("largest_tokens", {})
    for prefix in index["pairs"]:
        dataset = data_root / prefix
        if (size := stated_vocabulary(dataset)) is not None:
            if size > architecture.vocab_size:
                raise UserError(
                    f"{manifest_path(dataset)}: tokens of a vocabulary of {size}, {embeddings}; "
                    "use the tokenizer of the checkpoint"
                )
            continue
        largest = largest_tokens[prefix] if prefix in largest_tokens else check_foreign(dataset)
        if largest >= architecture.vocab_size:
            raise UserError(
                f"{bin_path(dataset)}: holds token {largest}, {embeddings}; tokenize again with "
                "the tokenizer of the checkpoint"
            )


def check_trial_samples(run: Run, index: IndexContent, *, num_steps: int) -> None:
    """Check that the index has enough training samples for a trial."""
    num_samples, needed = num_training_samples(index), num_steps * run.train.global_batch_size
    if num_samples < needed:
        raise UserError(
            f"{run.index}: has {num_samples} training samples, {num_steps} steps take "
            f"{needed}; lower --steps"
        )


def check_splits(train: TrainSettings, corpora: list[Corpus], *, where: str) -> None:
    """Check that there is data to validate on, and that the length of the run is known."""
    missing = [corpus.corpus for corpus in corpora if corpus.trains and corpus.epochs is None]
    if train.num_samples is None and missing:
        raise UserError(
            f"{where}: train: no length of the run; set train_steps, train_samples or "
            f"train_tokens, or epochs of {', '.join(missing)}"
        )
    if not split_fractions(train.split)[0] and not all(c.sets for c in corpora if c.trains):
        raise UserError(
            f"{where}: train: split: {train.split!r}: nothing to train on; give the first number a "
            "share, or name the split train in the column sets of the table of corpora"
        )
    if train.evaluation_steps and not set(held_out_splits(train, corpora)) - {"test"}:
        has_share = float(train.split.split(",")[1]) > 0
        share = "" if has_share else "give the second number a share, "
        reason = " (all corpora have sets of their own)" if has_share else ""
        raise UserError(
            f"{where}: train: split: {train.split!r}: nothing to validate on{reason}; {share}name "
            "a validation split in the column sets of the table of corpora, or set "
            "evaluation_steps to 0"
        )


def held_out_splits(train: TrainSettings, corpora: Iterable[Corpus]) -> list[str]:
    """Splits of a run but the training split, as far as the config and the table decide.

    `train.split` is about corpora without sets of their own. `evaluate` has the same order.
    """
    rows = list(corpora)
    shares = zip(NAMES[1:], split_fractions(train.split)[1:], strict=True)
    shared = [name for name, share in shares if share]
    named = [name for corpus in rows for name in corpus.parts if name != "train"]
    is_shared = any(corpus.is_split for corpus in rows)
    splits = dict.fromkeys([*(shared if is_shared else ()), *named])
    return sorted(splits, key=lambda name: name not in NAMES)
