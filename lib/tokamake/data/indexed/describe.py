"""Stage `describe`: check indexed datasets completely; print or write their metadata.

docs/reference/metadata.md explains the keys of the metadata.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tokamake.data.corpus.plan_file import read_plan
from tokamake.data.indexed.check_dataset import CheckedDataset, check_dataset
from tokamake.data.indexed.length_histogram import document_lengths, histogram
from tokamake.data.indexed.manifest_counts import left_out, skipped, verdicts
from tokamake.data.indexed.merge_inputs import expand_prefixes
from tokamake.data.indexed.paths import corpus_of
from tokamake.errors import UserError
from tokamake.files import is_stream, write_json
from tokamake.runtime.console import counted, progress

_COPIED = ("dtype", "vocab_size", "eod", "tokenizer", "bytes", "sha256")
_COUNTS = (
    *("documents_in", "quarantined_documents", "duplicate_documents"),
    *("near_duplicate_documents", "filtered_documents", "filters"),
)


def describe(
    prefixes: list[Path] | None = None,
    /,
    *,
    output: Path | None = None,
    plan: Path | None = None,
    input: Path | None = None,
) -> None:
    """Check indexed datasets completely; print their content, or write their metadata.

    The check covers sizes, lengths, pointers and document bounds. If a dataset has a manifest, it
    also covers the counts in the manifest, the hash of each file, and that no token is outside the
    vocabulary. All faults of all datasets are printed; the exit status is 2 if there is one. With
    --output, the tokens of datasets with a manifest are not read again.

    The metadata is a list of objects with at least `data_prefix`, `total_num_docs` and
    `total_num_tokens`. Prefixes are relative to the folder of the JSON file, so that you can move
    the folder. A second folder, named as the JSON file without .json, gets one file for each
    dataset. Document lengths are in tokens, including the end-of-document token; the bins of their
    histogram double in width. Datasets of other programs, without a manifest, are hashed; unknown
    values are null. If no manifest names the corpus, it is the name of the dataset up to its
    number: <corpus>-<number>.

    Args:
        prefixes: datasets, without .bin or .idx, or folders: all datasets of a folder.
        output: JSON file for all datasets.
        plan: plan.json, to describe its merged datasets instead of prefixes; needs `input`.
        input: folder of the plan's merged datasets.
    """
    named = sorted(_prefixes(prefixes or [], plan, folder=input))
    _refuse_duplicates(named)
    if output is not None:
        _refuse_overwrite(named, output)
    checked = _checked(named, read_tokens=output is None)
    if output is None:
        _print_table(checked)
    faults = [fault for dataset in checked for fault in dataset.faults]
    if faults:
        raise UserError("\n".join(faults))
    if output is not None:
        _write(output, checked)


def _prefixes(prefixes: list[Path], plan: Path | None, *, folder: Path | None) -> list[Path]:
    if (plan is None) != (folder is None) or (plan is not None and prefixes):
        raise UserError("give prefixes, or --plan with --input")
    if plan is not None and folder is not None:
        prefixes = [folder / merged.name for merged in read_plan(plan).merged]
    if not prefixes:
        raise UserError("no dataset given; name at least one prefix")
    return expand_prefixes(prefixes)


def _refuse_duplicates(prefixes: list[Path]) -> None:
    known: set[Path] = set()
    for prefix in prefixes:
        if prefix.resolve() in known:
            raise UserError(f"{prefix}: named twice; name it once")
        known.add(prefix.resolve())


def _refuse_overwrite(prefixes: list[Path], output: Path) -> None:
    """Check that the metadata files of single datasets overwrite no manifest and no other file."""
    if is_stream(output):
        return
    folder = output.with_suffix("")
    if output.suffix != ".json":
        raise UserError(f"{output}: give an --output whose name ends with .json")
    known: dict[str, Path] = {}
    for prefix in prefixes:
        if folder.resolve() == prefix.parent.resolve():
            raise UserError(
                f"{output}: the metadata of single datasets would go to {folder}, the folder of "
                "the datasets' manifests; name another --output"
            )
        if known.setdefault(prefix.name, prefix) is not prefix:
            raise UserError(
                f"{prefix}: {known[prefix.name]} has the same name, and both would be "
                f"{folder / prefix.name}.json; rename one or describe them separately"
            )


def _checked(prefixes: list[Path], *, read_tokens: bool) -> list[CheckedDataset]:
    check = partial(check_dataset, read_tokens=read_tokens)
    # Threads suffice: hashing and most of numpy release the interpreter lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(check, prefixes)
        return list(progress(results, label="describe", total=len(prefixes), unit="datasets"))


def _print_table(checked: list[CheckedDataset]) -> None:
    rows = [
        ("dataset", "documents", "sequences", "tokens", "bytes", "dtype", "tokenizer", "verdict"),
        *map(_row, checked),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True))
        words = (cell.ljust(width) for cell, width in zip(row[5:7], widths[5:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *numbers, *words, row[7]]))
    for dataset in checked:
        if counts := left_out(dataset.manifest or {}):
            print(f"{dataset.prefix}: {counts}")
        if kinds := skipped(dataset.manifest or {}):
            named = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
            print(f"{dataset.prefix}: records skipped: {named}")
        for verdict in verdicts((dataset.manifest or {}).get("filters", ())):
            print(
                f"{dataset.prefix}: {verdict.filter}: {verdict.reason}: "
                f"{counted(verdict.documents, 'document')}, {verdict.share:.2%}"
                + ("" if verdict.mean is None else f", mean {verdict.mean:,.4g}")
            )
    num_damaged = sum(bool(dataset.faults) for dataset in checked)
    print(f"{counted(len(checked), 'dataset')}, {num_damaged or 'none'} damaged")


def _row(dataset: CheckedDataset) -> tuple[str, ...]:
    numbers: list[int | None] = [None] * 3
    if dataset.layout is not None:
        layout = dataset.layout
        numbers = [layout.bounds.length - 1, layout.lengths.length, dataset.tokens]
    cells = [f"{n:,}" if n is not None else "-" for n in [*numbers, dataset.bytes.get("bin")]]
    verdict = counted(len(dataset.faults), "fault") if dataset.faults else "whole"
    fingerprint = ((dataset.manifest or {}).get("tokenizer") or "-")[:12]
    dtype = "-" if dataset.dtype is None else dataset.dtype.name
    return (str(dataset.prefix), *cells, dtype, fingerprint, verdict)


def _write(output: Path, checked: list[CheckedDataset]) -> None:
    is_file = not is_stream(output)
    folder = output.parent if is_file else Path()
    metadata = [_metadata(dataset, os.path.relpath(dataset.prefix, folder)) for dataset in checked]
    for dataset, described in zip(checked, metadata, strict=True):
        if is_file:
            write_json(output.with_suffix("") / f"{dataset.prefix.name}.json", described)
    write_json(output, metadata)
    tokens = sum(dataset.tokens for dataset in checked)
    print(f"{output}: {counted(len(checked), 'dataset')}, {counted(tokens, 'token')}")


def _metadata(dataset: CheckedDataset, relative: str) -> dict[str, Any]:
    """Return the metadata of a dataset; `relative` is its prefix from the folder of the output."""
    layout, dtype = dataset.layout, dataset.dtype
    assert layout is not None
    assert dtype is not None
    known: dict[str, Any] = dataset.manifest or {
        "dtype": dtype.name,
        "bytes": dataset.bytes,
        "sha256": dataset.sha256,
        "inputs": [],
    }
    return {
        "data_prefix": relative,
        "total_num_docs": layout.bounds.length - 1,
        "total_num_sequences": layout.lengths.length,
        "total_num_tokens": dataset.tokens,
        "corpus": known.get("corpus") or corpus_of(str(dataset.prefix)),
        **{key: known.get(key) for key in ("text_bytes", "empty_documents")},
        **{key: known[key] for key in _COUNTS if key in known},
        "tokens_per_byte": _ratio(dataset.tokens, known.get("text_bytes")),
        "lengths": histogram(document_lengths(layout)),
        **{key: known.get(key) for key in _COPIED},
        "sources": known["sources"] if "sources" in known else _own_source(dataset.prefix, known),
    }


def _own_source(prefix: Path, known: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"path": str(prefix), **{key: known[key] for key in ("inputs", "sha256")}}]


def _ratio(tokens: int, text_bytes: int | None) -> float | None:
    return round(tokens / text_bytes, 6) if text_bytes else None
