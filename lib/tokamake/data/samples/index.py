"""Stage `index`: decide the tokens of every training and validation sample, and their order."""

import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tokamake import files
from tokamake.config.objective import DEFAULT, IndexedObjective, objective_data
from tokamake.data.corpus.splits import SplitRule
from tokamake.data.indexed.check_dataset import check_foreign, stated_vocabulary
from tokamake.data.mixture.split_prefixes import SplitPrefixes, parse_held_out
from tokamake.data.mixture.weighting_file import divide_root, find_root
from tokamake.data.samples.blend_index import find_datasets, write_split
from tokamake.data.samples.index_folder import (
    VERSION,
    existing_splits,
    identity,
    is_complete,
    sizes,
)
from tokamake.data.samples.index_options import (
    Blend,
    IndexSettings,
    Within,
    check_datasets,
    find_companions,
    parse_epochs,
    read_objective,
)
from tokamake.data.samples.sentence_masking import PIECES
from tokamake.errors import UserError
from tokamake.runtime.console import counted
from tokamake.units import in_bytes

_BYTES_PER_SAMPLE = 10
"""Place of a sample in the order: its dataset (int16) and its number there (int64)."""


def index(
    *,
    weights: Path,
    data_root: Path | None = None,
    sequence_length: int,
    train_samples: int | None = None,
    epochs: Sequence[str] = (),
    valid_samples: int,
    split: str,
    split_rule: SplitRule = "megatron_core",
    held_out: Sequence[str] = (),
    blend: Blend = "weighted",
    within_corpus: Within = "shuffled",
    separate_last_epoch: bool | None = None,
    drop_last_partial_sequence: bool = True,
    objective: str = DEFAULT,
    masking: str = "{}",
    objective_settings: str = "{}",
    tokenizer: Path | None = None,
    seed: int,
    output: Path,
) -> None:
    """Build the sample index of every dataset and blend the datasets into one order.

    The arrays equal megatron-core's arrays for the same datasets, weights and seed. A complete
    output of the same datasets and options is kept.

    Args:
        weights: Weighting file of the training: lines of `weight prefix corpus [START:END]`.
        data_root: Folder that prefixes are relative to. Default: TOKAMAKE_DATA_ROOT, or the folder
            of the weighting file.
        sequence_length: Tokens that the model sees per sample; a sample holds one more.
        train_samples: Training samples of the whole run.
        epochs: Exact epochs of the training, instead of train_samples: "1" or "1.5" for all
            corpora, "wiki=3" for one. Weights are then ignored.
        valid_samples: Samples of each validation split per evaluation; 0 builds no validation
            index.
        split: Shares of each dataset's documents for training, validation and test: "949,50,1".
        split_rule: Rounding of shares to documents: as megatron-core or as Megatron-DeepSpeed.
        held_out: Weighting files of other splits, NAME=FILE each: test, valid, or another name for
            an additional validation split. The split holds all documents of the listed datasets,
            or the parts that the lines name.
        blend: Order of the datasets' samples: by weight as Megatron draws them, or exact in
            integers, between datasets or between corpora.
        within_corpus: Order inside each corpus, if corpora are blended.
        separate_last_epoch: Shuffle a partly used last epoch separately, so that no document is
            seen more often than necessary. Default: if less than 80 % of it is used, as Megatron
            does.
        drop_last_partial_sequence: Drop the last tokens of a validation split that do not fill a
            sample; otherwise pad that sample with tokens that have no loss.
        objective: Training objective: causal, retro, masked (BERT), span_corruption (T5) or ict
            (dense retrieval). The last three need datasets of sentences.
        masking: Masking settings as JSON: the section train.masking of the config.
        objective_settings: Settings of the objective as JSON: the section of `train` with the
            objective's name, such as train.ict.
        tokenizer: Tokenizer of the datasets, which objectives of sentences need.
        seed: Seed of the shuffles.
        output: Folder to write: index.json, train/ and, with validation samples, valid/.
    """
    indexed = read_objective(
        objective,
        masking,
        section=objective_settings,
        sequence_length=sequence_length,
        tokenizer=tokenizer,
        separate_last_epoch=separate_last_epoch,
        drop_last_partial_sequence=drop_last_partial_sequence,
    )
    settings = IndexSettings(
        sequence_length,
        seed,
        blend=blend,
        within_corpus=within_corpus,
        separate_last_epoch=separate_last_epoch,
        drop_last_partial_sequence=drop_last_partial_sequence,
        objective=indexed.stated or None,
    )
    _check_values(settings, train_samples, epochs=epochs, valid_samples=valid_samples)
    _check_room(output, (train_samples or 0) + valid_samples)
    _, data_root = divide_root(find_root(weights, data_root))
    splits = SplitPrefixes(
        weights,
        data_root=data_root,
        split=split,
        split_rule=split_rule,
        held_out=parse_held_out(held_out),
    )
    companions = find_companions(
        objective, indexed.stated, prefixes=_prefixes(splits), data_root=data_root
    )
    splits.leave_out({*companions.values()})
    epochs_of = parse_epochs(epochs, splits.lines("train"))
    prefixes = [*_prefixes(splits), *companions.values()]
    check_datasets(data_root, prefixes, objective=objective, tokenizer=indexed.tokenizer)
    # Keys of index.json. The digest over them is the identity of the index.
    options = {
        **settings.options(),
        "split": split,
        "split_rule": split_rule,
        "train_samples": train_samples,
        "epochs": epochs,
        "valid_samples": valid_samples,
        "pairs": {prefix: identity(data_root, prefix, thorough=True) for prefix in prefixes},
    }
    lines = {name: splits.lines(name) for name in splits.names}
    request = files.digest([VERSION, options, lines])
    if is_complete(output, request):
        print(f"{output}: already complete")
        return
    written = _write(
        output,
        {"version": VERSION, **options, "request": request},
        splits=splits,
        data_root=data_root,
        settings=settings,
        epochs_of=epochs_of,
        indexed=indexed._replace(companions=companions),
    )
    _report(output, written)


def _write(
    output: Path,
    options: dict[str, Any],
    *,
    splits: SplitPrefixes,
    data_root: Path,
    settings: IndexSettings,
    epochs_of: dict[str, Fraction],
    indexed: IndexedObjective,
) -> dict[str, Any]:
    # `resolve` compares them with the model, whose vocabulary is unknown here.
    largest_tokens = {
        prefix: check_foreign(data_root / prefix)
        for prefix in options["pairs"]
        if stated_vocabulary(data_root / prefix) is None
    }
    datasets_of = find_datasets(
        splits,
        data_root,
        blend=settings.blend,
        validate=options["valid_samples"] > 0,
        has_sentences=objective_data(settings.objective_name).has_sentences,
        companions=indexed.companions,
    )
    with files.atomic_folder(output, also=existing_splits(output)) as folder:
        written = {
            name: write_split(
                folder / name,
                datasets=datasets,
                settings=settings.of(name),
                num_samples=options["train_samples" if name == "train" else "valid_samples"],
                epochs_of=epochs_of,
                pieces=indexed.pieces,
            )
            for name, datasets in datasets_of.items()
        }
        if indexed.pieces is not None:
            np.save(folder / PIECES, indexed.pieces)
        description = {**options, "splits": written, "largest_tokens": largest_tokens}
        description["bytes"] = sizes(folder)
        description["sha256"] = {name: files.sha256(folder / name) for name in sizes(folder)}
        # index.json is written last: without it a folder is not an index.
        description["digest"] = files.digest(description)
        files.write_json(folder / "index.json", description)
    return written


def _check_values(
    settings: IndexSettings, train_samples: int | None, *, epochs: Sequence[str], valid_samples: int
) -> None:
    # samples x sequence_length must fit int64, with room for the surplus of Megatron.
    max_samples = 2**62 // max(settings.sequence_length, 1)
    _check_range("sequence_length", settings.sequence_length, lowest=2, highest=2**31 - 2)
    _check_range("valid_samples", valid_samples, lowest=0, highest=max_samples)
    _check_range("seed", settings.seed, lowest=0, highest=2**32 - 1)
    if train_samples is not None:
        _check_range("train_samples", train_samples, lowest=1, highest=max_samples)
    if (train_samples is None) == (not epochs):
        raise UserError("give --train-samples or --epochs, and not both")


def _check_range(name: str, value: int, *, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise UserError(f"{name}: {value}: out of range; give {lowest} to {highest}")


def _check_room(output: Path, num_samples: int) -> None:
    """Check that the order of this many samples fits on the disk, before hours of work."""
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.is_dir())
    needed, free = _BYTES_PER_SAMPLE * num_samples, shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{output}: the order of {num_samples:,} samples takes {in_bytes(needed)}, the file "
            f"system has {in_bytes(free)} left; give fewer samples, or another --output"
        )


def _prefixes(splits: SplitPrefixes) -> list[str]:
    return list(dict.fromkeys(line.prefix for name in splits.names for line in splits.lines(name)))


def _report(output: Path, written: dict[str, Any]) -> None:
    prefixes = {dataset["prefix"] for split in written.values() for dataset in split["files"]}
    counts = [f"{split['samples']:,} {name}" for name, split in written.items()]
    listed = " and ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
    print(f"{output}: {listed} samples from {counted(len(prefixes), 'dataset')}")
