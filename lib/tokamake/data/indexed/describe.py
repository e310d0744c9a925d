"""Stage `describe`: what pairs hold, as a table or as metadata, and whether they are whole.

Pairs come from `merge`, `tokenize` or other programs; `weigh` and `plot` read the metadata, whose
keys docs/metadata.md explains.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokamake.data.indexed.verify import VerifiedDataset

_COPIED = ("dtype", "vocab_size", "eod", "tokenizer", "bytes", "sha256")
_COUNTS = ("documents_in", "quarantined_documents", "duplicate_documents")


def describe(
    prefixes: list[Path] | None = None,
    /,
    *,
    output: Path | None = None,
    plan: Path | None = None,
    input: Path | None = None,
) -> None:
    """Check pairs completely and print what they hold; with --output write their metadata.

    Checked are sizes, lengths, pointers and document bounds; of pairs with a manifest what it
    states, each file's hash, and that no token is outside the vocabulary. All faults of all pairs
    are told, and the exit status is 2 if there is one. With --output, tokens of pairs with a
    manifest are not read again.

    The metadata is a list of objects with at least `data_prefix`, `total_num_docs` and
    `total_num_tokens`; prefixes are relative to its folder, so that the folder can be moved. The
    folder of the same name without .json gets one file a pair. Lengths are those of documents in
    tokens, their end-of-document token included, counted in bins that double in width. Pairs of
    other programs, without a manifest, are hashed; what is not known of them is null. The corpus
    of a pair whose manifest names none is its name up to the first hyphen.

    Args:
        prefixes: pairs, named without .bin or .idx, or folders: all pairs there.
        output: JSON file for all pairs.
        plan: plan whose merged pairs are described, instead of prefixes; takes `input`.
        input: folder of the plan's merged pairs.

    Raises:
        UserError: a pair is missing or damaged.
    """
    from tokamake.errors import UserError

    named = sorted(_prefixes(prefixes or [], plan, input))
    _refuse_twice(named)
    if output is not None:
        _refuse_loss(named, output)
    checked = _check(named, read_tokens=output is None)
    if output is None:
        _print_table(checked)
    faults = [fault for pair in checked for fault in pair.faults]
    if faults:
        raise UserError("\n".join(faults))
    if output is not None:
        _write(output, checked)


def _prefixes(prefixes: list[Path], plan: Path | None, folder: Path | None) -> list[Path]:
    from tokamake.data.corpus.plan_file import read_plan
    from tokamake.data.indexed.merge_groups import expand
    from tokamake.errors import UserError

    if (plan is None) != (folder is None) or (plan is not None and prefixes):
        raise UserError("give prefixes, or --plan with --input")
    if plan is not None and folder is not None:
        prefixes = [folder / pair.name for pair in read_plan(plan).merged]
    if not prefixes:
        raise UserError("no pair given; name at least one prefix")
    return expand(prefixes)


def _refuse_twice(prefixes: list[Path]) -> None:
    from tokamake.errors import UserError

    known: set[Path] = set()
    for prefix in prefixes:
        if prefix.resolve() in known:
            raise UserError(f"{prefix}: named twice; name it once")
        known.add(prefix.resolve())


def _refuse_loss(prefixes: list[Path], output: Path) -> None:
    """Each pair's file is named after it, in a folder that is not that of the manifests."""
    from tokamake.errors import UserError

    folder = output.with_suffix("")
    if output.suffix != ".json":
        raise UserError(f"{output}: give an --output whose name ends with .json")
    known: dict[str, Path] = {}
    for prefix in prefixes:
        if folder.resolve() == prefix.parent.resolve():
            raise UserError(
                f"{output}: the folder of single files would be {folder}, where the pairs' "
                "manifests are; name another --output"
            )
        if known.setdefault(prefix.name, prefix) is not prefix:
            raise UserError(
                f"{prefix}: {known[prefix.name]} has the same name, and both would be "
                f"{folder / prefix.name}.json; rename one or describe them apart"
            )


def _check(prefixes: list[Path], *, read_tokens: bool) -> "list[VerifiedDataset]":
    """Check pairs, several at once, and give them in order."""
    import os
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    from tokamake.data.indexed.verify import verify
    from tokamake.runtime.console import progress

    check = partial(verify, read_tokens=read_tokens)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(check, prefixes)
        return list(progress(found, label="describe", total=len(prefixes), unit="pairs"))


def _print_table(checked: "list[VerifiedDataset]") -> None:
    from tokamake.runtime.console import counted

    rows = [
        ("pair", "documents", "sequences", "tokens", "bytes", "dtype", "tokenizer", "verdict"),
        *map(_row, checked),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:5], widths[1:5], strict=True))
        words = (cell.ljust(width) for cell, width in zip(row[5:7], widths[5:], strict=True))
        print("  ".join([row[0].ljust(widths[0]), *numbers, *words, row[7]]))
    damaged = sum(bool(pair.faults) for pair in checked)
    print(f"{counted(len(checked), 'pair')}, {damaged or 'none'} damaged")


def _row(pair: "VerifiedDataset") -> tuple[str, ...]:
    from tokamake.runtime.console import counted

    numbers: list[int | None] = [None] * 3
    if pair.layout is not None:
        numbers = [pair.layout.bounds.length - 1, pair.layout.lengths.length, pair.tokens]
    cells = [f"{n:,}" if n is not None else "-" for n in [*numbers, pair.bytes.get("bin")]]
    verdict = counted(len(pair.faults), "fault") if pair.faults else "whole"
    fingerprint = ((pair.stated or {}).get("tokenizer") or "-")[:12]
    dtype = "-" if pair.dtype is None else pair.dtype.name
    return (str(pair.prefix), *cells, dtype, fingerprint, verdict)


def _write(output: Path, checked: "list[VerifiedDataset]") -> None:
    import os

    from tokamake.files import write_json
    from tokamake.runtime.console import counted

    described = [_metadata(pair, os.path.relpath(pair.prefix, output.parent)) for pair in checked]
    for pair, told in zip(checked, described, strict=True):
        write_json(output.with_suffix("") / f"{pair.prefix.name}.json", told)
    write_json(output, described)
    tokens = sum(pair.tokens for pair in checked)
    print(f"{output}: {counted(len(checked), 'pair')}, {counted(tokens, 'token')}")


def _metadata(pair: "VerifiedDataset", relative: str) -> dict[str, Any]:
    from tokamake.data.indexed.length_histogram import document_lengths, histogram
    from tokamake.data.indexed.paths import corpus_of

    layout, dtype = pair.layout, pair.dtype
    assert layout is not None
    assert dtype is not None
    alone = {"dtype": dtype.name, "bytes": pair.bytes, "sha256": pair.sha256, "inputs": []}
    known: dict[str, Any] = pair.stated or alone
    return {
        "data_prefix": relative,
        "total_num_docs": layout.bounds.length - 1,
        "total_num_sequences": layout.lengths.length,
        "total_num_tokens": pair.tokens,
        "corpus": known.get("corpus") or corpus_of(str(pair.prefix)),
        **{key: known.get(key) for key in ("text_bytes", "empty_documents")},
        **{key: known[key] for key in _COUNTS if key in known},
        "tokens_per_byte": _ratio(pair.tokens, known.get("text_bytes")),
        "lengths": histogram(document_lengths(layout)),
        **{key: known.get(key) for key in _COPIED},
        "sources": known["sources"] if "sources" in known else _itself(pair.prefix, known),
    }


def _itself(prefix: Path, known: dict[str, Any]) -> list[dict[str, Any]]:
    """A pair that is not merged, as the one part that it consists of."""
    return [{"path": str(prefix), **{key: known[key] for key in ("inputs", "sha256")}}]


def _ratio(tokens: int, text_bytes: int | None) -> float | None:
    return round(tokens / text_bytes, 6) if text_bytes else None
