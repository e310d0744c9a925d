"""Existing indexed datasets in place of merged ones: check them, and link to their files.

Tokens are not copied, unless the current Megatron cannot read them: with an index in TNTIDX or
floating-point tokens, `merged_dataset` writes new files.
"""

from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake import __version__
from tokamake.data.indexed.check_dataset import TokenScan
from tokamake.data.indexed.manifest import (
    HashedRange,
    check_tokenizer,
    hashed_ranges,
    joined_sha256,
    raw_inputs,
    sizes_and_hashes,
    write_manifest,
)
from tokamake.data.indexed.merge_inputs import (
    MergeInput,
    common_dtype,
    highest_token,
    open_merge_input,
)
from tokamake.data.indexed.merged_dataset import SUMS, refuse_overwrite, write_merged
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path, sources_path
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.files import atomic
from tokamake.runtime.console import counted

_KEPT = (*SUMS, "text_key", "template", "split_sentences")
"""Keys that the manifests of a dataset and of the merged dataset share."""
_MERGING = Lock()
"""Held while a new dataset is written, which already uses all cores."""


def write_linked(
    prefix: Path, output: Path, *, corpus: str, tokenizer: Tokenizer, has_eod: bool, request: str
) -> None:
    """Check an indexed dataset, and make it a merged dataset without a copy of its tokens.

    Earlier links at `output` are replaced. With `has_eod`, each document must end with the
    end-of-document token. The manifest states `request`, a digest of all inputs and options.
    """
    check_tokenizer(prefix, tokenizer)
    dataset = open_merge_input(prefix, index_at_once=True)
    ranges = _checked_tokens(dataset, tokenizer, has_eod=has_eod)
    known = dataset.manifest or {"inputs": []}
    facts = {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "documents": dataset.documents,
        "sequences": dataset.sequences,
        "tokens": dataset.tokens,
        **{key: known[key] for key in _KEPT if key in known},
    }
    if dataset.layout.in_tokens or dataset.dtype.kind == "f":
        dtype = common_dtype([dataset])
        # Writing over a link would change the file that it names.
        remove_links(output)
        with _MERGING:
            write_merged(
                [dataset], output, corpus=corpus, dtype=dtype, request=request, stated=facts
            )
        return
    source = {"path": str(prefix), "inputs": raw_inputs(known), "sha256": known.get("sha256", {})}
    _link(
        dataset,
        output,
        ranges=ranges,
        manifest={
            "request": request,
            "tokamake": __version__,
            "corpus": corpus,
            "sources": [source],
            "dtype": dataset.dtype.name,
            **facts,
        },
    )
    # One string: threads print at the same time.
    print(f"{output}: links to {prefix}, {counted(dataset.tokens, 'token')}\n", end="")


def remove_links(output: Path) -> None:
    """Remove links of a merged dataset to an existing one, whose files stay."""
    for name in (bin_path, idx_path, sources_path):
        if name(output).is_symlink():
            manifest_path(output).unlink(missing_ok=True)
            name(output).unlink()


def _checked_tokens(
    dataset: MergeInput, tokenizer: Tokenizer, *, has_eod: bool
) -> list[HashedRange]:
    """Hash the token file in one pass, and compare it with its manifest and with the tokenizer."""
    binary = bin_path(dataset.prefix)
    last_tokens = _last_tokens(dataset) if has_eod else np.zeros(0, np.int64)
    if dataset.dtype.kind == "f":
        if (highest := highest_token(binary, dataset.dtype)) >= tokenizer.vocab_size:
            raise UserError(
                f"{binary}: has token {highest}, the vocabulary {tokenizer.vocab_size:,} entries; "
                "name the tokenizer that made the dataset"
            )
        tokens = np.memmap(binary, dataset.dtype, "r") if dataset.tokens else np.zeros(0)
        num_open = int(np.count_nonzero(tokens[last_tokens] != tokenizer.eod))
        _check_eod(binary, num_open, num_documents=len(last_tokens), eod=tokenizer.eod)
        return []
    expected = hashed_ranges(dataset.manifest) if dataset.manifest else []
    scan = TokenScan(
        dataset.dtype, tokenizer.vocab_size, last_tokens=last_tokens, eod=tokenizer.eod
    )
    ranges = list(scan.hash_ranges(binary, [hashed.size for hashed in expected]))
    if expected and ranges != expected:
        raise UserError(f"{binary}: differs from the hash in its manifest; rebuild the dataset")
    for fault in scan.faults(binary):
        remedy = "leave the dataset out" if tokenizer.has_text else "raise tokenizer.vocab_size"
        raise UserError(f"{fault}, or {remedy}")
    _check_eod(binary, scan.num_open, num_documents=len(last_tokens), eod=tokenizer.eod)
    return ranges


def _last_tokens(dataset: MergeInput) -> NDArray[np.int64]:
    """Position of the last token of each document that has tokens."""
    ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *dataset.layout.lengths.chunks()]))
    document_ends = ends[np.concatenate([*dataset.layout.bounds.chunks()])]
    return document_ends[1:][np.diff(document_ends) > 0] - 1


def _check_eod(binary: Path, num_open: int, *, num_documents: int, eod: int) -> None:
    if num_open:
        raise UserError(
            f"{binary}: {num_open:,} of {num_documents:,} documents do not end with {eod}, the "
            "tokenizer's end-of-document token; name the tokenizer that made the dataset, or with "
            "kind ids set tokenizer.eod; if they end with none, set tokenize.append_eod to false"
        )


def _link(
    dataset: MergeInput, output: Path, *, ranges: list[HashedRange], manifest: dict[str, Any]
) -> None:
    """Make links to the files of a dataset, then write the manifest.

    `merge_batch` flushes them to disk, once for all datasets of a batch. If the power fails before
    that, a manifest may be truncated: it then counts as damaged, and the dataset is made again.
    """
    folder = _resolved(dataset.prefix.parent.absolute())
    links = []
    if not bin_path(output).is_symlink():
        refuse_overwrite(output, [dataset])
    # Remove the old manifest first and write the new one last: links without a manifest are an
    # unfinished dataset. So each link may be made in place.
    manifest_path(output).unlink(missing_ok=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    for name in (bin_path, idx_path, sources_path):
        link, target = name(output), folder / name(dataset.prefix).name
        link.unlink(missing_ok=True)
        if target.exists():
            link.symlink_to(target)
            links.append(link)
    hashes = sizes_and_hashes(
        *links, bin_sha256=joined_sha256(ranges), index=dataset.layout.content
    )
    parts = {"parts": [list(hashed) for hashed in ranges]} if len(ranges) > 1 else {}
    with atomic(manifest_path(output), durable=False) as (temporary,):
        write_manifest(temporary, {**manifest, **hashes, **parts})


@lru_cache(maxsize=16)
def _resolved(folder: Path) -> Path:
    """Real path of an absolute folder; thousands of datasets share one."""
    return folder.resolve()
