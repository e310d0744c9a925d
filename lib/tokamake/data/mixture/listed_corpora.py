"""Corpora of a weighting file that lists existing indexed datasets: `weights` of the config.

The lines of one corpus become a row as in the table of corpora, with the format indexed.
"""

from pathlib import Path

from tokamake.data.corpus.corpora import Corpus, ListedDataset, listed_corpus
from tokamake.data.mixture.weights import find_prefix, location, scan
from tokamake.errors import UserError
from tokamake.remote.remote_file import is_remote


def read_listed_corpora(weights: Path, data_root: Path | None) -> list[Corpus]:
    """Read a weighting file as corpora, in the order of their first lines.

    Lines of weight 0 are left out: no sample is drawn from them.
    """
    if not weights.exists():
        raise UserError(f"weights: {weights}: no such file; fix the path of the list")
    root = weights.parent if data_root is None else data_root
    lines, problems = scan(weights)
    # A problem of the whole file, such as no weight above 0, may come from its lines.
    if errors := [problem for problem in problems if problem.number] or problems:
        raise UserError("\n".join(location(weights, p.number) + p.text for p in errors))
    datasets: dict[str, list[ListedDataset]] = {}
    for number, _, _, entry in lines:
        if entry.weight:
            where = location(weights, number).removesuffix(": ")
            if is_remote(entry.prefix):
                raise UserError(
                    f"{where}: {entry.prefix}: a list takes no addresses; name raw files behind "
                    "addresses in a table of corpora"
                )
            prefix = find_prefix(entry.prefix, root, search=data_root is not None)
            listed = ListedDataset(prefix, entry.weight, entry.part, where)
            datasets.setdefault(entry.corpus, []).append(listed)
    return [listed_corpus(corpus, listed) for corpus, listed in datasets.items()]
