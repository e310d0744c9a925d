"""Stage `describe`: metadata of the merged pairs, one JSON file a pair and one for all."""

from pathlib import Path
from typing import Any

_COPIED = ("dtype", "vocab_size", "eod", "tokenizer", "bytes", "sha256")
_COUNTS = ("documents_in", "quarantined_documents", "duplicate_documents")


def describe(
    prefixes: list[Path] | None = None,
    /,
    *,
    output: Path,
    plan: Path | None = None,
    input: Path | None = None,
) -> None:
    """Write the metadata of pairs: documents, tokens, lengths, bytes, hashes, corpus, sources.

    The file for all is a list of objects with at least `data_prefix`, `total_num_docs` and
    `total_num_tokens`; prefixes are relative to its folder, so that the folder can be moved. The
    folder of the same name without .json gets one file a pair. Lengths are those of documents in
    tokens, their end-of-document token included, counted in bins that double in width.

    Args:
        prefixes: pairs with their manifests, named without .bin or .idx.
        output: JSON file for all pairs.
        plan: plan whose merged pairs are described, instead of prefixes; takes `input`.
        input: folder of the plan's merged pairs.

    Raises:
        UserError: a pair is missing or differs in size from its manifest.
    """
    import os

    from tokamake.files import write_json

    described = []
    for prefix in sorted(_prefixes(prefixes or [], plan, input)):
        relative = os.path.relpath(prefix, output.parent)
        described.append(_describe_pair(prefix, relative))
        write_json(output.with_suffix("") / f"{prefix.name}.json", described[-1])
    write_json(output, described)
    tokens = sum(pair["total_num_tokens"] for pair in described)
    print(f"{output}: {len(described)} pairs, {tokens:,} tokens")


def _prefixes(prefixes: list[Path], plan: Path | None, folder: Path | None) -> list[Path]:
    from tokamake.data.text.planned import read_plan
    from tokamake.errors import UserError

    if (plan is None) != (folder is None) or (plan is not None and prefixes):
        raise UserError("describe: give prefixes, or --plan with --input")
    if plan is not None and folder is not None:
        prefixes = [folder / pair.name for pair in read_plan(plan).merged]
    if not prefixes:
        raise UserError("describe: no pair given; name at least one prefix")
    return prefixes


def _describe_pair(prefix: Path, relative: str) -> dict[str, Any]:
    from tokamake.data.pairs import read_manifest
    from tokamake.data.pairs.indexed import IndexedDataset
    from tokamake.data.pairs.statistics import document_lengths, histogram
    from tokamake.errors import UserError

    manifest = read_manifest(prefix)
    pair = IndexedDataset(prefix)
    tokens, documents = int(pair.lengths.sum(dtype="int64")), len(pair.document_bounds) - 1
    # Documents without a token are counted apart, and stand in the index only if asked for.
    # How many there are, and all else that no index tells, is not known of other programs' pairs.
    possible = (manifest["documents"], manifest["documents"] + manifest.get("empty_documents", 0))
    if (tokens, len(pair)) != (manifest["tokens"], manifest["sequences"]) or (
        documents not in possible
    ):
        raise UserError(
            f"{prefix}: its index differs from its manifest; remove the pair and run again"
        )
    return {
        "data_prefix": relative,
        "total_num_docs": documents,
        "total_num_sequences": len(pair),
        "total_num_tokens": tokens,
        "corpus": manifest.get("corpus", ""),
        **{key: manifest.get(key) for key in ("text_bytes", "empty_documents")},
        **{key: manifest[key] for key in _COUNTS if key in manifest},
        "tokens_per_byte": _ratio(tokens, manifest.get("text_bytes")),
        "lengths": histogram(document_lengths(pair)),
        **{key: manifest.get(key) for key in _COPIED},
        "sources": manifest["sources"] if "sources" in manifest else _itself(prefix, manifest),
    }


def _itself(prefix: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """A pair that is not merged, as the one part that it consists of."""
    return [{"path": str(prefix), **{key: manifest[key] for key in ("inputs", "sha256")}}]


def _ratio(tokens: int, text_bytes: int | None) -> float | None:
    return round(tokens / text_bytes, 6) if text_bytes else None
