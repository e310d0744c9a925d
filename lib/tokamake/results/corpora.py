"""Corpora: documents of the datasets of `describe`, and mixtures of runs, from their indexes."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from tokamake import files
from tokamake.config.resolved_run import Run, read_run
from tokamake.data.indexed import length_histogram
from tokamake.data.indexed.length_histogram import Bin
from tokamake.data.indexed.manifest_counts import merge_counts, skipped
from tokamake.data.samples.index_folder import read_index
from tokamake.errors import UserError
from tokamake.results.frames import Row, concat, frame, pick, run_folders

COUNTS = (
    *("documents_in", "empty_documents", "duplicate_documents", "near_duplicate_documents"),
    *("quarantined_documents", "filtered_documents"),
)
"""Counts of the documents of raw files, in metadata.json."""
_SUMS = {
    **{"documents": "Int64", "tokens": "Int64", "text_bytes": "Int64"},
    **dict.fromkeys(COUNTS, "Int64"),
    **{"skipped": "object", "lengths": "object", "filters": "object"},
}
_DOCUMENTS = {"data_set": "string", "corpus": "string", "prefix": "string", **_SUMS}
MIXTURE = {
    **{"run": "string", "corpus": "string", "datasets": "Int64", **_SUMS},
    **{"trained_tokens": "Int64", "share_of_tokens": "float64"},
    **{"share_of_samples": "float64", "epochs": "float64"},
}
_NAMES = {"data_prefix": "prefix", "total_num_docs": "documents", "total_num_tokens": "tokens"}


def documents(*folders: str | Path) -> pd.DataFrame:
    """Merged datasets and their documents (metadata.json), a row for each dataset, by prefix.

    | column | dtype | meaning |
    |---|---|---|
    | data_set | string | setting of the config |
    | corpus, prefix | string | corpus, and path in the data folder |
    | documents, tokens | Int64 | in the dataset |
    | text_bytes | Int64 | bytes of the raw text in UTF-8; missing: not known |
    | documents_in | Int64 | documents of the raw files, with all that follow; missing: not known |
    | empty_documents | Int64 | documents without tokens |
    | duplicate_documents | Int64 | documents left out: an earlier one is equal or nearly so |
    | near_duplicate_documents | Int64 | the ones of them that are nearly equal |
    | quarantined_documents | Int64 | documents set aside: unreadable, or a filter failed |
    | filtered_documents | Int64 | documents that filters dropped, or with repeated text only |
    | skipped | object | records that are no documents, such as redirects: dict of kind → number |
    | lengths | object | histogram of lengths in tokens: dicts, as in metadata.json |
    | filters | object | filters and their counts: dicts, as in metadata.json |

    Args:
        folders: results folders.

    Raises:
        UserError: a folder does not exist, or a metadata.json is damaged.
    """
    frames = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; name a results folder")
        for path in [folder / "data/metadata.json", *sorted(folder.glob("data/*/metadata.json"))]:
            if path.is_file():
                name = "default" if path.parent.name == "data" else path.parent.name
                frames.append(read_documents(path).assign(data_set=name))
    return concat(frames, _DOCUMENTS)


def read_documents(metadata: Path) -> pd.DataFrame:
    """The datasets in a file of `describe`, in its order; columns of `documents`."""
    remedy = "make it with `tokamake describe`"
    described = files.read_json(metadata, remedy)
    if not isinstance(described, list):
        raise UserError(f"{metadata}: not a list of datasets; {remedy}")
    rows = []
    for dataset in described:
        lengths = dataset.get("lengths") if isinstance(dataset, dict) else None
        if not isinstance(lengths, list) or not all(map(_is_bin, lengths)):
            raise UserError(f"{metadata}: has no lengths; rerun `tokamake describe`")
        filters = dataset.get("filters", [])
        if not isinstance(filters, list) or not all(isinstance(each, dict) for each in filters):
            raise UserError(f"{metadata}: filters are not a list of objects; {remedy}")
        named = {
            _NAMES.get(key, key): value
            for key, value in dataset.items()
            if key not in ("lengths", "filters")
        }
        if "documents_in" in named:  # without filters and near-duplicates, there are no such keys
            named.setdefault("filtered_documents", 0)
            named.setdefault("near_duplicate_documents", 0)
        row = pick(named, _DOCUMENTS, where=str(metadata), remedy=remedy)
        objects = {"lengths": tuple(lengths), "filters": tuple(filters)}
        rows.append({**row, **objects, "skipped": skipped(dataset)})
    return frame(rows, _DOCUMENTS)


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for each in counts:
        added.update(each)
    return dict(added)


def mixtures(*folders: str | Path) -> pd.DataFrame:
    """Corpora in the training samples of runs, a row for each run and corpus.

    | column | dtype | meaning |
    |---|---|---|
    | run, corpus | string | name of the run's folder, and of the corpus |
    | datasets | Int64 | merged datasets |
    | documents to filters | | as in `documents`, for the corpus; missing: no metadata.json |
    | trained_tokens | Int64 | tokens of its training documents |
    | share_of_tokens | float64 | share of the training tokens of all corpora, 0 to 1 |
    | share_of_samples | float64 | share of the training samples, 0 to 1 |
    | epochs | float64 | passes of the run over its training documents |

    Args:
        folders: results folders, or folders of single runs. Runs without an index are left out.

    Raises:
        UserError: a folder does not exist, or a file is damaged.
    """
    frames = []
    for folder in run_folders(folders):
        if (folder / "index/index.json").is_file():
            run = read_run(folder / "run.yaml")
            data = folder.parent / "data"
            metadata = (
                data if run.data_set == "default" else data / run.data_set
            ) / "metadata.json"
            known = metadata if metadata.is_file() else None
            mixture = read_mixture(metadata=known, index=folder / "index", run=run)
            frames.append(mixture.assign(run=folder.name))
    return concat(frames, MIXTURE)


def read_mixture(*, metadata: Path | None, index: Path, run: Run) -> pd.DataFrame:
    """Columns of `mixtures`; corpora in the order of the metadata, then of the index.

    Corpora without training samples have share 0. Epochs are drawn tokens / tokens of the corpus;
    for biencoders, drawn samples / blocks.
    """
    drawn = read_index(index)["splits"]["train"]["files"]
    corpus_of_prefix = {file["prefix"]: file["corpus"] for file in drawn}
    # Titles are no documents of their own.
    companions = {file["companion"] for file in drawn if "companion" in file}
    datasets: dict[str, list[Row]] = {}
    for row in read_documents(metadata).to_dict("records") if metadata else []:
        if row["prefix"] in companions:
            continue
        datasets.setdefault(corpus_of_prefix.get(row["prefix"], row["corpus"]), []).append(row)
    names = dict.fromkeys([*datasets, *corpus_of_prefix.values()])
    samples, tokens = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for file in drawn:
        samples[file["corpus"]] += file["drawn_samples"]
        tokens[file["corpus"]] += file["tokens"]
    all_samples, all_tokens = sum(samples.values()), sum(tokens.values())
    consumed, of_epoch = (run.train.num_samples or 0) * run.train.sequence_length, {**tokens}
    if run.architecture.has_towers:
        consumed, of_epoch = run.train.num_samples or 0, dict.fromkeys(names, 0)
        for file in drawn:
            of_epoch[file["corpus"]] += file["num_samples"] // max(1, file["epochs"])
    rows: list[Row] = []
    for name in names:
        share = samples[name] / all_samples
        own = datasets.get(name, [])
        known = {"datasets": len(own), **sums(own)} if metadata else {}
        rows.append(
            {
                **{"corpus": name, **known, "trained_tokens": tokens[name]},
                "share_of_tokens": tokens[name] / all_tokens if all_tokens else 0.0,
                "share_of_samples": share,
                "epochs": share * consumed / of_epoch[name] if of_epoch[name] else 0.0,
            }
        )
    return frame(rows, MIXTURE)


def sums(parts: list[Row]) -> Row:
    """Documents, tokens and the like of several rows; missing: not known for one of them."""
    counts: Row = {}
    for name in (name for name, dtype in _SUMS.items() if dtype == "Int64"):
        values = [part[name] for part in parts]
        counts[name] = None if any(map(pd.isna, values)) else sum(values)
    return {
        **counts,
        "skipped": _added(part["skipped"] for part in parts),
        "lengths": tuple(length_histogram.add(part["lengths"] for part in parts)),
        "filters": tuple(merge_counts(part["filters"] for part in parts)),
    }


def _is_bin(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= Bin.__required_keys__


def total(corpora: pd.DataFrame) -> pd.DataFrame:
    """Sum of corpora in one row. Its epochs are consumed tokens divided by training tokens."""
    trained_tokens = corpora["trained_tokens"].sum()
    consumed_tokens = sum(corpora["epochs"] * corpora["trained_tokens"])
    row = {
        **{"corpus": "all", **sums(corpora.to_dict("records"))},
        "epochs": consumed_tokens / trained_tokens if trained_tokens else 0.0,
    }
    added = ("datasets", "trained_tokens", "share_of_tokens", "share_of_samples")
    return frame([row | {name: sum(corpora[name]) for name in added}], MIXTURE)


def largest(corpora: pd.DataFrame, max_rows: int) -> pd.DataFrame:
    """Return at most `max_rows` rows: the largest corpora, and the sum of the smaller ones."""
    if len(corpora) <= max_rows:
        return corpora
    ordered = corpora.sort_values(["share_of_samples", "corpus"], ascending=[False, True])
    small = ordered[max_rows - 1 :]
    rest = total(small).assign(corpus=f"{len(small)} other corpora")
    return pd.concat([ordered[: max_rows - 1], rest], ignore_index=True)
