"""Datasets of titles: document n has the title of document n of a dataset of texts.

`tokenize` with the text keys text,title makes X_text and X_title in one pass over the raw files;
Megatron-LM's preprocess_data.py makes X_text_sentence and X_title_document.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokamake.data.indexed.index_reader import read_layout
from tokamake.data.indexed.manifest import find_manifest
from tokamake.data.indexed.paths import idx_path
from tokamake.errors import UserError


def title_names(prefixes: Iterable[str], *, text: str, titles: str) -> dict[str, list[str]]:
    """Map each dataset of texts to the names that the dataset of its titles may have.

    Args:
        text: key of the texts in names of datasets.
        titles: key of the titles.
    """
    pattern = re.compile(rf"(.*_){re.escape(text)}(?:_(?:sentence|document))?")
    of_titles = re.compile(rf".*_{re.escape(titles)}(?:_(?:sentence|document))?")
    names: dict[str, list[str]] = {}
    for prefix in prefixes:
        if (match := pattern.fullmatch(prefix)) is not None:
            levels = [""] if prefix.endswith(f"_{text}") else ["_sentence", "_document"]
            names[prefix] = [f"{match[1]}{titles}{level}" for level in levels]
        elif not of_titles.fullmatch(prefix):
            raise UserError(
                f"{prefix}: has no titles: its name does not end in _{text}; write text_key "
                f"{text},{titles} in the table of corpora, name the keys in train.ict.text and "
                "train.ict.titles, or set train.ict.titles to '' for blocks without titles"
            )
    paired = {name for candidates in names.values() for name in candidates}
    if alone := [prefix for prefix in prefixes if prefix not in names and prefix not in paired]:
        raise UserError(f"{alone[0]}: titles without texts; also list the dataset of their texts")
    return names


def check_titles(texts: Path, titles: Path) -> None:
    """Check that two datasets have the same documents, in the same order.

    Datasets of tokamake state the raw line of each document. Other datasets are compared by their
    numbers of documents.
    """
    counts = [read_layout(idx_path(prefix)).bounds.length - 1 for prefix in (texts, titles)]
    if counts[0] != counts[1]:
        raise UserError(
            f"{titles}: {counts[1]:,} documents, but {texts} has {counts[0]:,}: titles do not "
            "belong to the texts; tokenize both keys in one pass, with tokenize.empty_documents: "
            "keep"
        )
    origins = [_origin(find_manifest(prefix) or {}) for prefix in (texts, titles)]
    if None not in origins and origins[0] != origins[1]:
        raise UserError(
            f"{titles}: its documents come from other lines of the raw files than {texts}: titles "
            "do not belong to the texts; tokenize both keys in one pass, with "
            "tokenize.empty_documents: keep"
        )


def _origin(manifest: dict[str, Any]) -> list[Any] | None:
    """Raw files of a dataset, and hash of the lines of its documents; None: not stated."""
    lines = manifest.get("sha256", {}).get("sources")
    files = [(raw["sha256"], raw["byte_range"]) for raw in manifest.get("inputs", [])]
    return [lines, files] if lines else None
