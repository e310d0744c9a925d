"""The stage `index`: which tokens every training and validation sample holds, and in which order.

Reads weighting files and the .idx files they name; writes the index folder that `loader` opens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.data.corpus.splits import Rule
from tokamake.data.mixture.split_prefixes import SplitPrefixes, parse_held_out
from tokamake.data.mixture.weights import find_root
from tokamake.data.samples.draw import Blend, Within
from tokamake.data.samples.epochs import parse_epochs
from tokamake.data.samples.index_folder import VERSION, identity, is_whole, made_sets, sizes
from tokamake.data.samples.split_index import IndexSettings, find_sources, write_set
from tokamake.errors import UserError
from tokamake.runtime.console import counted


def index(
    *,
    weights: Path,
    data_root: Path | None = None,
    sequence_length: int,
    train_samples: int | None = None,
    epochs: Sequence[str] = (),
    valid_samples: int,
    split: str,
    split_rule: Rule = "megatron_core",
    held_out: Sequence[str] = (),
    blend: Blend = "weighted",
    within_corpus: Within = "shuffled",
    separate_last_epoch: bool | None = None,
    drop_last_partial_sequence: bool = True,
    seed: int,
    output: Path,
) -> None:
    """Build the sample indexes of every token file and blend them into one order.

    The arrays are those that megatron-core builds from the same files, weights and seed. An output
    that is whole and was built from the same files with the same options is left as it is.

    Args:
        weights: Weighting file of the training: lines of `weight prefix corpus [START:END]`.
        data_root: Folder that the prefixes are relative to; without it TOKAMAKE_DATA_ROOT or the
            folder of the weighting file.
        sequence_length: Tokens that the model sees per sample; a sample holds one more.
        train_samples: Training samples of the whole run.
        epochs: Instead of train_samples how often the training sees the files, exactly: "1" or
            "1.5", or of one corpus "wiki=3"; weights do not count then.
        valid_samples: Samples of each validation set per measurement; 0 makes no validation index.
        split: Shares of each file's documents for training, validation and test: "949,50,1".
        split_rule: How shares become documents: as megatron-core rounds, or as Megatron-DeepSpeed.
        held_out: Weighting files of other sets, NAME=FILE each: test, valid, or any other name for
            a further validation set. It holds all documents of its files or the parts it names.
        blend: Order of the files' samples: as Megatron draws by weight; or exact in integers, of
            files or of corpora.
        within_corpus: Where corpora are blended, the order inside each.
        separate_last_epoch: Shuffle a last epoch that is used in part by itself, so that no
            document comes a time more than needed; without it so if less than 80 % is used, as
            Megatron does.
        drop_last_partial_sequence: Leave out the last tokens of a validation set where they do not
            fill a sample; else that sample is filled up with tokens that have no loss.
        seed: Seed of the shuffles.
        output: Folder to write: index.json, train/ and, with validation samples, valid/.

    Raises:
        UserError: a value is out of range, a file is missing or damaged, or a set is empty.
    """
    settings = IndexSettings(
        sequence_length,
        seed,
        blend=blend,
        within_corpus=within_corpus,
        separate_last_epoch=separate_last_epoch,
        drop_last_partial_sequence=drop_last_partial_sequence,
    )
    _check_values(settings, train_samples, epochs, valid_samples)
    data_root = find_root(weights, data_root)
    sets = SplitPrefixes(
        weights,
        data_root=data_root,
        split=split,
        split_rule=split_rule,
        held_out=parse_held_out(held_out),
    )
    stated = parse_epochs(epochs, sets.lines("train"))
    options = {
        **settings._asdict(),
        "split": split,
        "split_rule": split_rule,
        "train_samples": train_samples,
        "epochs": epochs,
        "valid_samples": valid_samples,
        "pairs": {prefix: identity(data_root, prefix, thorough=True) for prefix in _prefixes(sets)},
    }
    request = files.digest([VERSION, options, {name: sets.lines(name) for name in sets.names}])
    if is_whole(output, request):
        print(f"{output}: is whole already")
        return
    found = find_sources(sets, data_root, blend=blend, validate=valid_samples > 0)
    with files.atomic_folder(output, also=made_sets(output)) as folder:
        made = {
            name: write_set(
                folder / name,
                sources=sources,
                settings=settings.of(name),
                num_samples=train_samples if name == "train" else valid_samples,
                stated=stated,
            )
            for name, sources in found.items()
        }
        described = {"version": VERSION, **options, "request": request, "splits": made}
        described["bytes"] = sizes(folder)
        files.write_json(folder / "index.json", {**described, "digest": files.digest(described)})
    _report(output, made)


def _check_values(
    settings: IndexSettings, train_samples: int | None, epochs: Sequence[str], valid_samples: int
) -> None:
    most = 2**62 // max(settings.sequence_length, 1)
    _check("sequence_length", settings.sequence_length, 2, 2**31 - 2)
    _check("valid_samples", valid_samples, 0, most)
    _check("seed", settings.seed, 0, 2**32 - 1)
    if train_samples is not None:
        _check("train_samples", train_samples, 1, most)
    if (train_samples is None) == (not epochs):
        raise UserError("give --train-samples or --epochs, one of them")


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{name}: {value}: out of range; give {least} to {most}")


def _prefixes(sets: SplitPrefixes) -> list[str]:
    """All pairs that some set may draw from, in the order in which they are first named."""
    return list(dict.fromkeys(line.prefix for name in sets.names for line in sets.lines(name)))


def _report(output: Path, made: dict[str, Any]) -> None:
    num_files = len({file["prefix"] for described in made.values() for file in described["files"]})
    counts = [f"{described['samples']:,} {name}" for name, described in made.items()]
    told = " and ".join([", ".join(counts[:-1]), counts[-1]] if len(counts) > 1 else counts)
    print(f"{output}: {told} samples from {counted(num_files, 'file')}")
