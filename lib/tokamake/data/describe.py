"""Stage `describe`: metadata of the merged pairs, one JSON file a pair and one for all."""

from pathlib import Path
from typing import Any


def describe(prefixes: list[Path], /, *, output: Path) -> None:
    """Write the metadata of pairs: documents, sequences, tokens, bytes, hashes, corpus, sources.

    The file for all is a list of objects with at least `data_prefix`, `total_num_docs` and
    `total_num_tokens`; prefixes are relative to its folder, so that the folder can be moved. The
    folder of the same name without .json gets one file a pair.

    Args:
        prefixes: pairs with their manifests, named without .bin or .idx.
        output: JSON file for all pairs.

    Raises:
        UserError: a pair is missing or differs in size from its manifest.
    """
    import os

    from tokamake.errors import UserError
    from tokamake.files import write_json

    if not prefixes:
        raise UserError("describe: no pair given; name at least one prefix")
    described = []
    for prefix in sorted(prefixes):
        relative = os.path.relpath(prefix, output.parent)
        described.append(_describe_pair(prefix, relative))
        write_json(output.with_suffix("") / f"{prefix.name}.json", described[-1])
    write_json(output, described)
    tokens = sum(pair["total_num_tokens"] for pair in described)
    print(f"{output}: {len(described)} pairs, {tokens:,} tokens")


def _describe_pair(prefix: Path, relative: str) -> dict[str, Any]:
    from tokamake.data.indexed import IndexedDataset
    from tokamake.data.pairs import read_manifest
    from tokamake.errors import UserError

    manifest = read_manifest(prefix)
    pair = IndexedDataset(prefix)
    tokens = int(pair.lengths.sum(dtype="int64"))
    if (tokens, len(pair)) != (manifest["tokens"], manifest["sequences"]):
        raise UserError(
            f"{prefix}: its index differs from its manifest; remove the pair and run again"
        )
    return {
        "data_prefix": relative,
        "total_num_docs": manifest["documents"],
        "total_num_sequences": len(pair),
        "total_num_tokens": tokens,
        **{
            key: manifest[key]
            for key in ("corpus", "text_bytes", "empty_documents", "dtype", "vocab_size", "eod")
        },
        **{key: manifest[key] for key in ("tokenizer", "bytes", "sha256", "sources")},
    }
