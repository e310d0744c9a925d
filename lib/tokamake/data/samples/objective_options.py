"""Options of `index` about the objective: settings, tokenizer and datasets must fit together."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.config.masking import MaskingSettings, ObjectiveName
from tokamake.config.objective import sample_settings
from tokamake.config.training import TrainSettings
from tokamake.data.indexed.tokenizer_check import check_tokenizer
from tokamake.data.samples.objective import SentenceMasking, make_masking, piece_kinds
from tokamake.data.samples.sentence_data import check_sentences, ends_with_eod
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError
from tokamake.validation import parse_json, validate

_log = logging.getLogger(__name__)


class ObjectiveVocabulary(NamedTuple):
    """An encoder objective with its vocabulary."""

    objective: SentenceMasking
    pieces: npt.NDArray[np.uint8]
    """(vocabulary,) kind of each token."""
    tokenizer: Tokenizer


def read_vocabulary(
    objective: ObjectiveName,
    masking: str,
    *,
    sequence_length: int,
    tokenizer: Path | None,
    separate_last_epoch: bool | None,
    drop_last_partial_sequence: bool,
) -> ObjectiveVocabulary | None:
    """Check the options of an objective, and look up its tokens; None: it is causal."""
    settings = {
        "objective": objective,
        "masking": parse_json(MaskingSettings, masking, where="masking").model_dump(),
        "separate_last_epoch": separate_last_epoch,
        "drop_last_partial_sequence": drop_last_partial_sequence,
    }
    if objective == "causal":
        # Without the length of samples, which `index` checks by itself.
        validate(TrainSettings, settings, "index")
        return None
    train = validate(TrainSettings, {**settings, "sequence_length": sequence_length}, "index")
    if tokenizer is None:
        raise UserError(f"--tokenizer: missing; objective {objective} needs it")
    opened = open_tokenizer(tokenizer)
    return ObjectiveVocabulary(
        make_masking(sample_settings(train), opened, path=tokenizer),
        piece_kinds(opened, path=tokenizer),
        opened,
    )


def check_datasets(
    data_root: Path,
    prefixes: Iterable[str],
    *,
    objective: ObjectiveName,
    vocabulary: ObjectiveVocabulary | None,
) -> None:
    """Check that datasets fit the objective and were made with its tokenizer."""
    with_eod = []
    for prefix in prefixes:
        check_sentences(data_root / prefix, objective=objective)
        if vocabulary:
            check_tokenizer(data_root / prefix, vocabulary.tokenizer)
            if ends_with_eod(data_root / prefix):
                with_eod.append(prefix)
    if with_eod:
        _log.warning(
            "%s and %d other datasets: documents end with an end-of-document token, which models "
            "of objective %s do not expect; tokenize with append_eod: false",
            *(with_eod[0], len(with_eod) - 1, objective),
        )
