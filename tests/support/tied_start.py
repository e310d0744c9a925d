"""A run whose model has a tied embedding; a pipeline has a copy of it in the last stage."""

from pathlib import Path

from tests.support.random_tensors import random_tensors
from tests.support.runs import ARCHITECTURE, prepare, write_start

SAVED = "global_step2"
TIED = ARCHITECTURE.model_copy(update={"tie_word_embeddings": True, "num_hidden_layers": 4})


def prepare_tied(folder: Path) -> Path:
    """Like `prepare`; `start` has the tied model, `other` the untied one."""
    root = prepare(folder)
    (root / "start").rename(root / "other")
    write_start(root / "start", TIED, random_tensors(TIED, 5))
    return root
