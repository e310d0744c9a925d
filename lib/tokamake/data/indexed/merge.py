"""Tool `merge`: concatenate indexed datasets into one, or into several of limited size."""

from pathlib import Path

from tokamake.data.indexed.merge_groups import (
    expand_prefixes,
    group_inputs,
    numbered_prefixes,
    read_limit,
)
from tokamake.data.indexed.merged_dataset import open_inputs, refuse_overwrite, write_merged
from tokamake.errors import UserError


def merge(
    prefixes: list[Path],
    /,
    *,
    output: Path,
    corpus: str = "",
    max_bytes: str | None = None,
    max_tokens: int | None = None,
    max_documents: int | None = None,
) -> None:
    """Merge indexed datasets in the order given into one, or into several of limited size.

    The bytes are those that Megatron's merge_datasets.py writes. Datasets of other programs need no
    manifest: `merge` reads MMIDIDX of any Megatron, and converts TNTIDX (cached, lazy) to MMIDIDX
    and floating-point tokens to integers. It checks all indexes before it copies anything, and
    compares the files with their manifest. The manifest of the merged dataset has the size and hash
    of each input's tokens (`parts`: [bytes, sha256]); its `sha256.bin` is a digest of them.

    Args:
        prefixes: datasets to merge, without .bin or .idx, or folders: all datasets of a folder, in
            natural order of their names.
        output: prefix of the merged dataset.
        corpus: name of the corpus, for the manifest.
        max_bytes: maximum size of a merged .bin file, such as 5GB (powers of 1,000). The inputs are
            collected in order into OUTPUT-0000, OUTPUT-0001, ...; an input is never divided, even
            if it is larger.
        max_tokens: the same limit in tokens.
        max_documents: the same limit in documents.
    """
    if output.is_dir():
        raise UserError(f"--output {output}: is a folder; give a prefix, such as {output}/NAME")
    limit = read_limit(max_bytes, max_tokens, max_documents=max_documents)
    inputs, dtype = open_inputs(expand_prefixes(prefixes))
    if limit is None:
        write_merged(inputs, output, corpus=corpus, dtype=dtype)
        return
    groups = list(group_inputs(inputs, limit, dtype=dtype))
    outputs = numbered_prefixes(output, len(groups))
    for prefix in outputs:  # before anything is written
        refuse_overwrite(prefix, inputs)
    for prefix, group in zip(outputs, groups, strict=True):
        write_merged(group, prefix, corpus=corpus, dtype=dtype)
