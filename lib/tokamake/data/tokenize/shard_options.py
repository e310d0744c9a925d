"""Inputs and options of a shard, and the names of its files, which depend on them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus import documents
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path, sources_path
from tokamake.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How documents become sequences, and the action on bad documents.

    The manifest lists all fields under these names.
    """

    fields: documents.Fields
    format: str = ""
    append_eod: bool = True
    prepend_bos: bool = False
    special_tokens_in_text: Literal["special", "plain"] = "special"
    split_sentences: bool = False
    language: str = "en"
    empty_documents: Literal["skip", "keep"] = "skip"
    on_bad_document: Literal["stop", "quarantine"] = "stop"
    max_bad_fraction: float = 0.01
    megatron_names: bool = False
    filters: tuple[Mapping[str, Any], ...] = ()
    """Name of each filter → its options, as in the config."""
    filter_seconds: float = 60
    """Time limit of the filters of a document; 0: none."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise UserError(f"--language {self.language}: give an ISO 639 code, such as en or deu")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UserError(
                f"--max-bad-fraction {self.max_bad_fraction:g}: give a fraction from 0 to 1"
            )
        if not 0 <= self.filter_seconds < math.inf:
            raise UserError(
                f"--filter-seconds {self.filter_seconds:g}: give seconds, or 0 for no limit"
            )
        names = self.fields.names
        if (len(names) > 1 or self.megatron_names) and any("/" in name for name in names):
            raise UserError(
                f"--text-key {','.join(names)}: keys become parts of file names; use keys without /"
            )


@dataclass(frozen=True)
class ShardRequest:
    """A shard to write."""

    output: Path
    """Prefix of its indexed datasets."""
    paths: list[Path]
    byte_range: str = ""
    """Part of a single raw file, START:END, or empty."""
    duplicates: npt.NDArray[np.int64] | None = None
    """Ordinals of documents to leave out."""
    near_duplicates: npt.NDArray[np.int64] | None = None
    """Ordinals among `duplicates` that are near, not exact, duplicates; None: not asked for."""
    stamps: tuple[str, ...] = ()
    """Stamp of each raw file in the plan; empty without a plan."""
    repeats: npt.NDArray[Any] | None = None
    """Rows of `passages.CUT`: text to cut out."""


def dataset_prefixes(output: Path, options: ShardOptions) -> list[Path]:
    """Return the prefixes of a shard: PREFIX, or PREFIX_<key> for each of several keys.

    Megatron's preprocess_data.py always adds the key, and `document` or `sentence`.
    """
    names = options.fields.names
    if len(names) == 1 and not options.megatron_names:
        return [output]
    level = "_sentence" if options.split_sentences else "_document"
    end = level if options.megatron_names else ""
    return [output.with_name(f"{output.name}_{name}{end}") for name in names]


def dataset_files(prefix: Path) -> tuple[Path, ...]:
    """Return the files of an indexed dataset; the manifest, which vouches for them, comes last."""
    return bin_path(prefix), idx_path(prefix), sources_path(prefix), manifest_path(prefix)
