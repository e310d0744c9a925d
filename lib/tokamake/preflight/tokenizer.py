"""The tokenizer against settings and models of runs.

Facts are its files or, before they exist, the section `tokenizer` of the config.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from tokamake.checkpoint.random_source import check_vocab_size
from tokamake.config.architecture import Architecture
from tokamake.config.data import TokenizerSettings
from tokamake.config.train_sections import FimSettings
from tokamake.data.samples.fim.tokens import find_tokens
from tokamake.data.tokenizers import open_tokenizer, tokenizer_files
from tokamake.data.tokenizers._sentinels import appended_texts
from tokamake.errors import UserError, naming
from tokamake.preflight.initial_models import InitialModel, naming_setting
from tokamake.preflight.planned import WorkflowConfig

_MOST_PADDING = 1024
"""Embeddings that Megatron adds for tensor-parallel ranks are mostly fewer."""


def check_fim(fim: FimSettings, tokenizer: Path | TokenizerSettings | None) -> None:
    """Refuse fill-in-the-middle if the tokenizer lacks its special tokens, or changes cut text.

    Args:
        tokenizer: a file or folder, or settings of the tokenizer that the workflow will write.
    """
    if not fim.rate:
        return
    if tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; give it with --tokenizer")
    if isinstance(tokenizer, Path):
        find_tokens(fim, open_tokenizer(tokenizer), path=tokenizer)
        return
    if tokenizer.has_ids:
        raise UserError(
            f"train.fim.rate: {fim.rate:g}: tokenizer.kind ids has no special tokens; set it to 0, "
            "or name a tokenizer in tokenizer.path"
        )
    tokens = [fim.prefix, fim.suffix, fim.middle, *filter(None, [fim.split_token])]
    if missing := [token for token in tokens if token not in tokenizer.special_tokens]:
        raise UserError(
            f"train.fim: {', '.join(missing)}: not a token of the tokenizer that is to be trained; "
            "add it to tokenizer.special_tokens"
        )


def check_embeddings(
    tokenizer: Path, architecture: Architecture, *, source: str = "the model"
) -> None:
    """Refuse a tokenizer with more entries than the model has embeddings."""
    entries = open_tokenizer(tokenizer).vocab_size
    assert architecture.vocab_size is not None
    if entries > architecture.vocab_size:
        raise UserError(
            f"tokenizer {tokenizer}: has {entries:,} entries, {source} {architecture.vocab_size:,} "
            "embeddings; use the tokenizer of the checkpoint"
        )


def check_planned_tokenizer(config: WorkflowConfig, models: Mapping[str, InitialModel]) -> None:
    """Check the tokenizer of the runs that pretrain, before any job runs.

    Args:
        models: initial model of each run, as far as it is known.
    """
    given = config.given_tokenizer
    tokenizer = Path(given[0]) if given else config.shared.tokenizer
    setting = "tokenizer.path" if config.shared.tokenizer.path else "model.checkpoint"
    with naming_setting(next(iter(config.named_runs.values())).where, setting):
        entries = _entries(config, tokenizer)
    if given and setting == "model.checkpoint":
        _note_unused(config, tokenizer=given[0])
    checked = list[FimSettings]()
    for name, run in config.runs.items():
        where, fim, initial = config.named_runs[name].where, run.train.fim, models.get(name)
        with naming(where):
            if fim not in checked:
                checked.append(fim)
                check_fim(fim, tokenizer)
            if initial and run.model.checkpoint is None and entries is not None:
                check_vocab_size(initial.architecture, entries, source=initial.source)
        reads_text = any(not corpus.is_indexed for corpus in config.tables[name])
        needs_all = run.tokenizer.path or reads_text or fim.rate
        if initial and run.model.folder and isinstance(tokenizer, Path) and needs_all:
            source = f"model.checkpoint {run.model.folder} has"
            with naming_setting(where, setting):
                path = run.tokenizer.path or tokenizer
                check_embeddings(path, initial.architecture, source=source)
                _note_other(path, initial.architecture, folder=run.model.folder, run=name)


def _note_unused(config: WorkflowConfig, *, tokenizer: object) -> None:
    """Name settings of a tokenizer to train that have no effect."""
    settings = config.shared.tokenizer
    unused = [name for name in ("kind", "vocab_size") if name in settings.model_fields_set]
    if unused:
        print(
            f"tokamake: tokenizer.{' and '.join(unused)}: no effect: model.checkpoint has a "
            f"tokenizer, {tokenizer}; remove them, or name another one in tokenizer.path",
            file=sys.stderr,
        )


def _note_other(path: Path, architecture: Architecture, *, folder: Path, run: str) -> None:
    """Say that the tokenizer seems to be another one than the one of a checkpoint."""
    try:
        _, beside = tokenizer_files(folder)
    except UserError:
        beside = []
    tokenizer = open_tokenizer(path)
    assert architecture.vocab_size is not None
    num_unused = architecture.vocab_size - tokenizer.vocab_size
    if beside and open_tokenizer(folder).fingerprint != tokenizer.fingerprint:
        reason = f"{beside[0]} is another tokenizer"
    elif not beside and num_unused >= _MOST_PADDING:
        reason = (
            f"it has {tokenizer.vocab_size:,} entries, and {folder} {architecture.vocab_size:,} "
            "embeddings"
        )
    else:
        return
    print(
        f"tokamake: run {run}: tokenizer.path: {path}: is it the tokenizer of model.checkpoint? "
        f"{reason}",
        file=sys.stderr,
    )


def _entries(config: WorkflowConfig, tokenizer: Path | TokenizerSettings) -> int | None:
    """Entries of the runs' tokenizer with its sentinels; None: training it decides them."""
    if not isinstance(tokenizer, Path):
        return tokenizer.vocab_size if tokenizer.has_ids else None
    sentinels = config.shared.tokenizer.sentinels
    num_appended = len(appended_texts(sentinels)) if sentinels else 0
    return open_tokenizer(tokenizer).vocab_size + num_appended
