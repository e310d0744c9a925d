"""Texts and evaluation sets for tests of decontamination."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ITEM = (
    "A student mixes two clear liquids in a flask, and the flask becomes warm. Which observation "
    "best shows that a chemical reaction has released heat into the water around it?"
)
_SYLLABLES = ["ka", "lo", "mi", "ren", "tu", "sol", "ve", "dan", "pi", "gor"]


def sentences(words: int, *, seed: int = 1) -> str:
    """Text of random words; about each tenth word ends a sentence."""
    random = np.random.default_rng(seed)
    drawn = ["".join(random.choice(_SYLLABLES, 3)) for _ in range(words)]
    return " ".join(word + (". " if random.random() < 0.1 else "")[:1] for word in drawn)


def write_items(path: Path, items: Iterable[Mapping[str, Any]]) -> str:
    """Write an evaluation set; return its path."""
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)
