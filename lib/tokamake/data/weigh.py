"""Stage `weigh`: the weighting file, `weight prefix corpus` a line, from the corpora's weights."""

from pathlib import Path


def weigh(*, corpora: Path, metadata: Path, output: Path) -> None:
    """Write the weighting file: a corpus' share is divided among its files by their tokens.

    Weights sum to 1 and keep their full precision. Prefixes stay relative to the data root, so that
    the data can be moved without an edit.

    Args:
        corpora: table of corpora with their weights, as config/corpora.tsv.
        metadata: JSON file that `describe` wrote for all pairs.
        output: weighting file.

    Raises:
        UserError: a corpus has no pair or no token, or a pair belongs to no corpus of the table.
    """
    from tokamake.config import read_corpora
    from tokamake.errors import UserError
    from tokamake.files import read_json, write_text
    from tokamake.runtime import counted

    weights = {corpus.corpus: corpus.weight for corpus in read_corpora(corpora)}
    pairs = read_json(metadata, "make it with `tokamake describe`")
    tokens = dict.fromkeys(weights, 0)
    for pair in pairs:
        if not {"corpus", "data_prefix", "total_num_tokens"} <= set(pair):
            raise UserError(f"{metadata}: not written by `tokamake describe`; make it again")
        if pair["corpus"] not in weights:
            raise UserError(f'{metadata}: corpus "{pair["corpus"]}" is not in {corpora}; add a row')
        tokens[pair["corpus"]] += pair["total_num_tokens"]
    for corpus, total in tokens.items():
        if total == 0:
            raise UserError(f'{metadata}: corpus "{corpus}" has no token; remove it from {corpora}')
    lines = []
    for pair in pairs:
        share = weights[pair["corpus"]] / sum(weights.values())
        weight = share * pair["total_num_tokens"] / tokens[pair["corpus"]]
        lines.append(f"{weight!r} {pair['data_prefix']} {pair['corpus']}\n")
    write_text(output, "".join(lines))
    print(f"{output}: {counted(len(lines), 'file')} of {len(weights)} corpora")
