"""Files of a dataset of the Hub that belong to a configuration and a split.

The card (README.md) says so, or the names do, by the rules of the package `datasets`.
"""

import re
from collections.abc import Iterable
from typing import Any

from tokamake.errors import UserError
from tokamake.files import glob_expression
from tokamake.remote.addresses import HubAddress, shown

_SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""Words in names that name a split."""
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
"""Names that say their split, of any name: data/SPLIT-00000-of-00001.parquet."""
_KINDS = (
    re.compile(r"\.(jsonl?|ndjson|parquet|arrow)(\.(gz|zst|xz|bz2))?$"),
    # Beside other data, tables are mostly statistics; archives are the same data or pictures.
    re.compile(r"\.(csv|tsv)(\.(gz|zst|xz|bz2))?$"),
    re.compile(r"\.(zip|tgz|tar(\.(gz|zst|xz|bz2))?)$"),
)
"""Ends of names of data, if nobody names the files. The first kind with files counts."""
_NO_DATA = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
_HIDDEN = re.compile(r"(^|/)(\.|__)")
_MAX_STARS = 5
"""Wildcards of a pattern in a card: the time to match it is a power of their number."""
_CONVERTED = "refs/convert/parquet"
"""Revision to which the Hub converts datasets; its files are CONFIG/SPLIT/0000.parquet."""


def files_of(
    parsed: HubAddress, names: list[str], *, configs: list[dict[str, Any]], address: str
) -> list[str]:
    """Files of a configuration and a split of a dataset; empty: the default, and train."""
    is_converted = parsed.revision == _CONVERTED
    if is_converted:
        configs = _converted_configs(names)
    chosen = _choose_config(configs, parsed.config, address=address)
    if chosen and "data_files" in chosen:
        patterns = _split_patterns(chosen["data_files"], chosen.get("data_dir", ""))
        splits = {split: _match(members, names) for split, members in patterns.items()}
    else:
        folder = chosen.get("data_dir", "") if chosen else ""
        splits = _splits_by_name(names, folder.strip("/"), script=_script(parsed))
    splits = {split: members for split, members in splits.items() if members}
    split = parsed.split or "train"
    if split in splits:
        return splits[split]
    if is_converted and f"partial-{split}" in splits:
        raise UserError(
            f"{address}: the Hub has converted only a part of split {split}; "
            f"?split=partial-{split} takes it"
        )
    raise _no_split(parsed, names, splits=splits, address=address)


def _script(parsed: HubAddress) -> str:
    return f"{parsed.repository.partition('/')[2]}.py"


def _no_split(
    parsed: HubAddress, names: list[str], *, splits: Iterable[str], address: str
) -> UserError:
    if known := ", ".join(splits):
        return UserError(
            f"{address}: no file of split {parsed.split or 'train'}; it has the splits {known}; "
            "add ?split=NAME, or name files: hf://datasets/ORG/NAME/PATH"
        )
    if _script(parsed) in names:
        return UserError(
            f"{address}: a script makes this dataset, and tokamake runs none; the Hub may have "
            f"converted it: hf://datasets/{parsed.repository}@refs%2Fconvert%2Fparquet"
        )
    some = shown(names) or "no files"
    return UserError(
        f"{address}: no data that tokamake finds by itself among {some}; name files: "
        "hf://datasets/ORG/NAME/PATH, or save it with `datasets` (docs/howto/hub.md)"
    )


def _converted_configs(names: list[str]) -> list[dict[str, Any]]:
    """Return configurations as a card would name them, from folders CONFIG/SPLIT."""
    configs: dict[str, dict[str, str]] = {}
    for name in names:
        match name.split("/"):
            case [config, split, _]:
                configs.setdefault(config, {})[split] = f"{config}/{split}/*.parquet"
    return [
        {
            "config_name": config,
            "data_files": [{"split": split, "path": path} for split, path in splits.items()],
        }
        for config, splits in configs.items()
    ]


def _choose_config(
    configs: list[dict[str, Any]], name: str, *, address: str
) -> dict[str, Any] | None:
    """Return a configuration; None: the card names none."""
    known = ", ".join(config["config_name"] for config in configs)
    if name:
        chosen = [config for config in configs if config["config_name"] == name]
        if not chosen:
            raise UserError(f"{address}: no configuration {name}; choose one of {known or 'none'}")
        return chosen[0]
    defaults = [c for c in configs if c.get("default") or c["config_name"] == "default"]
    if len(configs) > 1 and not defaults:
        raise UserError(f"{address}: has the configurations {known}; add ?config=NAME")
    return next(iter(defaults or configs), None)


def _split_patterns(data_files: Any, folder: str) -> dict[str, list[str]]:
    """Patterns of each split, from the forms that a card may have."""
    if isinstance(data_files, str):
        data_files = [data_files]
    splits: dict[str, list[str]] = {}
    for item in data_files:
        entry = {"split": "train", **(item if isinstance(item, dict) else {"path": item})}
        paths = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
        if any(len(re.findall(r"\*+", path)) > _MAX_STARS for path in paths):
            raise TypeError(f"a pattern with more than {_MAX_STARS} wildcards")
        splits.setdefault(entry["split"], []).extend(
            f"{folder}/{path}".lstrip("/") if folder else path for path in paths
        )
    return splits


def _match(patterns: Iterable[str], names: list[str]) -> list[str]:
    expressions = [re.compile(glob_expression(pattern)) for pattern in patterns]
    return [name for name in names if any(e.fullmatch(name) for e in expressions)]


def _splits_by_name(names: list[str], folder: str, *, script: str) -> dict[str, list[str]]:
    """Return the files of each split by their names below a folder.

    Words in names of folders come first, then words in names of files; without such words, all
    files are for training.
    """
    prefix = f"{folder}/" if folder else ""
    inside = [
        name.removeprefix(prefix)
        for name in names
        if name.startswith(prefix)
        and not _HIDDEN.search(name.removeprefix(prefix))
        and name.rpartition("/")[2] not in _NO_DATA
    ]
    # A script reads the tables and archives beside it.
    kinds = _KINDS[:1] if script in names else _KINDS
    data = next(filter(None, ([n for n in inside if kind.search(n)] for kind in kinds)), [])
    splits = (
        _by_shards(data)
        or _by_words(data, r"(^|.*[-._ 0-9/])({words})([-._ 0-9][^/]*)?/.*")
        or _by_words(data, r"(.*/)?([^/]*[-._ 0-9])?({words})[-._ 0-9][^/]*")
        or {"train": data}
    )
    return {split: [prefix + name for name in members] for split, members in splits.items()}


def _by_shards(data: list[str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    for name in data:
        if match := _SHARD.fullmatch(name):
            splits.setdefault(match[1], []).append(name)
    known = [split for split in _SPLIT_WORDS if split in splits]
    rest = sorted(splits.keys() - {*known})
    return {split: splits[split] for split in [*known, *rest]}


def _by_words(data: list[str], pattern: str) -> dict[str, list[str]]:
    splits = {}
    for split, words in _SPLIT_WORDS.items():
        expression = re.compile(pattern.replace("{words}", words))
        if members := [name for name in data if expression.fullmatch(name)]:
            splits[split] = members
    return splits
