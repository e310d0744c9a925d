"""Options of `index` about the objective: settings, tokenizer and datasets must fit together."""

import logging
from collections.abc import Iterable
from pathlib import Path

from tokamake.config.masking import MaskingSettings
from tokamake.config.objective import IndexedObjective, objective_data
from tokamake.config.training import TrainSettings
from tokamake.data.indexed.manifest import check_tokenizer
from tokamake.data.samples.sentence_data import check_sentences, ends_with_eod
from tokamake.data.tokenizers import Tokenizer
from tokamake.validation import parse_json, validate

_log = logging.getLogger(__name__)


def read_objective(
    objective: str,
    masking: str,
    *,
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
    data = objective_data(objective)
    # `index` checks the length of samples of documents by itself.
    length = {"sequence_length": sequence_length} if data.has_sentences else {}
    train = validate(TrainSettings, settings | length, "index")
    train = train.model_copy(update={"sequence_length": sequence_length})
    return data.indexed(train, tokenizer)


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
            if ends_with_eod(data_root / prefix):
                with_eod.append(prefix)
    if with_eod:
        _log.warning(
            "%s and %d other datasets: documents end with an end-of-document token, which models "
            "of objective %s do not expect; tokenize with append_eod: false",
            *(with_eod[0], len(with_eod) - 1, objective),
        )
