"""Options of `index`: settings that decide the samples of a split, epochs, and the objective."""

import logging
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokamake.config.objective import DEFAULT, SECTIONS, IndexedObjective, objective_data
from tokamake.config.train_sections import MaskingSettings
from tokamake.config.training import TrainSettings
from tokamake.config_files import parse_json, validate
from tokamake.data.indexed.manifest import check_tokenizer, find_manifest
from tokamake.data.indexed.paths import idx_path
from tokamake.data.mixture.weighting_file import WeightedPrefix
from tokamake.data.samples.loader import check_sentences
from tokamake.data.samples.sentence_masking import KEY
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

Blend = Literal["weighted", "exact", "corpora"]
"""weighted: Megatron's order by weight. exact: each dataset has exactly its share of the samples,
spread evenly. corpora: the same between corpora; inside a corpus see `Within`."""

Within = Literal["concatenated", "shuffled", "blended"]
"""Datasets of a corpus: one after the other, all samples shuffled, or blended by their weights."""

_MAX_EPOCHS = 10**6

_log = logging.getLogger(__name__)


class IndexSettings(NamedTuple):
    """Settings that decide the samples of a split; most fields are options of `index`."""

    sequence_length: int
    seed: int
    blend: Blend
    within_corpus: Within
    """Only for `corpora`."""
    separate_last_epoch: bool | None
    drop_last_partial_sequence: bool
    objective: dict[str, Any] | None = None
    """Entry of index.json; None: there is none, as for the default objective."""

    @property
    def objective_name(self) -> str:
        return self.objective["name"] if self.objective else DEFAULT

    def of(self, name: str) -> "IndexSettings":
        """Settings of one split: training only takes whole samples."""
        return self._replace(drop_last_partial_sequence=True) if name == "train" else self

    def options(self) -> dict[str, Any]:
        options = self._asdict()
        objective = options.pop("objective")
        return options | ({KEY: objective} if objective else {})


def parse_epochs(options: Sequence[str], lines: Sequence[WeightedPrefix]) -> dict[str, Fraction]:
    """Epochs of each corpus of a weighting file: "1.5" applies to all, "wiki=3" to one.

    They are exact fractions: 1 epoch is exactly all samples.
    """
    corpora = dict.fromkeys(line.corpus for line in lines)
    parsed: dict[str, Fraction] = {}
    for option in options:
        corpus, _, number = option.rpartition("=")
        if corpus and corpus not in corpora:
            raise UserError(
                f"epochs: {option!r}: no such corpus in the weighting file; "
                f"choose one of {', '.join(corpora)}"
            )
        if corpus in parsed:
            raise UserError(f"epochs: {option!r}: given twice; remove one")
        parsed[corpus] = _number(option, number)
    default = parsed.pop("", None)
    epochs_of = {corpus: parsed.get(corpus, default) for corpus in corpora}
    for corpus, epochs in epochs_of.items():
        if options and epochs is None:
            raise UserError(f"epochs: corpus {corpus!r} has none; add {corpus}=NUMBER")
    return {corpus: epochs for corpus, epochs in epochs_of.items() if epochs is not None}


def _number(option: str, text: str) -> Fraction:
    try:
        number = Fraction(text)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if not 0 < number <= _MAX_EPOCHS:
        raise UserError(f"epochs: {option!r}: give a number above 0, up to {_MAX_EPOCHS:,}")
    return number


def read_objective(
    objective: str,
    masking: str,
    *,
    section: str,
    sequence_length: int,
    tokenizer: Path | None,
    separate_last_epoch: bool | None,
    drop_last_partial_sequence: bool,
) -> IndexedObjective:
    """Check the options of an objective, and look up its tokens."""
    settings = {
        "objective": objective,
        "masking": parse_json(MaskingSettings, masking, where="masking").model_dump(),
        "separate_last_epoch": separate_last_epoch,
        "drop_last_partial_sequence": drop_last_partial_sequence,
    }
    if objective in SECTIONS:
        settings[objective] = parse_json(SECTIONS[objective], section, where="objective_settings")
    data = objective_data(objective)
    # `index` checks the length of samples of the default objective by itself.
    checks_length = data.has_sentences or objective in SECTIONS
    length = {"sequence_length": sequence_length} if checks_length else {}
    train = validate(TrainSettings, settings | length, "index")
    train = train.model_copy(update={"sequence_length": sequence_length})
    return data.indexed(train, tokenizer)


def find_companions(
    objective: str, stated: dict[str, Any], *, prefixes: list[str], data_root: Path
) -> dict[str, str]:
    """Find and check the companion of each dataset, see `ObjectiveData.companions`.

    `stated` is the objective's entry of index.json.
    """
    data, found = objective_data(objective), {}
    for prefix, names in data.companions(stated, prefixes).items():
        existing = [name for name in names if idx_path(data_root / name).is_file()]
        if not existing:
            looked = " or ".join(str(data_root / name) for name in names)
            raise UserError(f"{data_root / prefix}: its companion is missing: no dataset {looked}")
        found[prefix] = existing[0]
        data.check_companion(data_root / prefix, data_root / existing[0])
    return found


def check_datasets(
    data_root: Path,
    prefixes: Iterable[str],
    *,
    objective: str,
    tokenizer: Tokenizer | None,
) -> None:
    """Check that datasets fit the objective and were made with its tokenizer."""
    with_eod = []
    for prefix in prefixes:
        check_sentences(data_root / prefix, objective=objective)
        if tokenizer:
            check_tokenizer(data_root / prefix, tokenizer)
            if (find_manifest(data_root / prefix) or {}).get("append_eod"):
                with_eod.append(prefix)
    if with_eod:
        _log.warning(
            "%s and %d other datasets: documents end with an end-of-document token, which models "
            "of objective %s do not expect; tokenize with append_eod: false",
            *(with_eod[0], len(with_eod) - 1, objective),
        )
