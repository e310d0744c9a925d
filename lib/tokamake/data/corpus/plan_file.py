"""What a plan holds, and how it lies in plan.json: shards, merged pairs, and the batches of both.

`plan` makes and writes it; jobs read from it what they are to make.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tokamake.errors import UserError
from tokamake.files import read_json, write_text


class PlannedShard(NamedTuple):
    """Raw files, or a part of one, that become a pair, or a pair for each of several text keys."""

    name: str
    """<corpus>/<number>: the pair's path below the folder of shards."""
    files: tuple[str, ...]
    """Raw files in order."""
    byte_range: str
    """Part of a single large file, START:END, or empty."""
    bytes: int
    """Estimated size of its .bin file."""
    stamp: str
    """Witness of the raw files' sizes and times, as `raw.stamp` gives it."""


class PlannedMerge(NamedTuple):
    """A pair that `merge` makes of neighbouring shards."""

    name: str
    """<corpus>-<number>_<text key>_document (or _sentence), as Megatron names pairs."""
    corpus: str
    """Corpus it belongs to."""
    key: str
    """Text key, where shards have a pair for each of several; empty where they have one."""
    shards: tuple[str, ...]
    """Names of its shards in order."""


class JobBatch(NamedTuple):
    """What one job makes: neighbouring shards of a corpus, or neighbouring merged pairs."""

    name: str
    """<corpus>-<number>."""
    members: tuple[str, ...]
    """Names of its shards, or of its merged pairs."""


class TokenizerCorpus(NamedTuple):
    """Raw files of a corpus that a tokenizer is trained on, and how they are read."""

    corpus: str
    """Name of the corpus."""
    format: str
    """Format of the files; empty: told from each."""
    text_key: str
    """Text keys, with commas between them."""
    template: str
    """Joins several keys to one text; may be empty."""
    files: tuple[str, ...]
    """Paths: those of the first plan that are still there."""


class Plan(NamedTuple):
    """Everything that is to be made of the raw files."""

    settings: dict[str, Any]
    """Sizes the plan was made with; other ones make a plan from scratch."""
    tokenizer_stamp: str
    """Changes with what a tokenizer is to be trained on, but not with files that come or go."""
    tokenizer: tuple[TokenizerCorpus, ...]
    """What a tokenizer is trained on: later files must not change the finished tokens."""
    tokenize_batches: tuple[JobBatch, ...]
    """Shards by job."""
    merge_batches: tuple[JobBatch, ...]
    """Merged pairs by job."""
    merged: tuple[PlannedMerge, ...]
    """All merged pairs."""
    shards: tuple[PlannedShard, ...]
    """All shards."""


_KINDS: dict[str, type[Any]] = {
    "tokenizer": TokenizerCorpus,
    "tokenize_batches": JobBatch,
    "merge_batches": JobBatch,
    "merged": PlannedMerge,
    "shards": PlannedShard,
}


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        UserError: the file is missing or not a plan.
    """
    remedy = "remove it to plan from scratch"
    try:
        value = orjson.loads(path.read_bytes())  # several times faster than json
    except (FileNotFoundError, orjson.JSONDecodeError):  # or names of files that are not UTF-8
        value = read_json(path, remedy if path.exists() else "make it with `tokamake plan`")
    try:
        for name, kind in _KINDS.items():
            items = value[name]
            for number, fields in enumerate(items):
                items[number] = _item(kind, fields)  # in its place, for the sake of memory
            value[name] = tuple(items)
        return Plan(**value)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a plan ({error}); {remedy}") from None


def _item(kind: type[Any], fields: dict[str, Any]) -> Any:
    for key, value in fields.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    return kind(**fields)


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan, an item a line, unless the file holds just that already."""
    parts = []
    for name, value in plan._asdict().items():
        if name in _KINDS:
            lines = ",\n".join(json.dumps(item._asdict()) for item in value)
            parts.append(f'"{name}": [\n{lines}\n]')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    text = "{\n" + ",\n".join(parts) + "\n}\n"
    if not path.exists() or path.read_bytes() != text.encode():
        write_text(path, text)


def batch_shards(path: Path, batch: str) -> list[PlannedShard]:
    """Shards of a `tokenize` batch of the plan in a file.

    Raises:
        UserError: the file is not a plan, or has no such batch.
    """
    plan = read_plan(path)
    names = _members(path, plan.tokenize_batches, batch)
    return [shard for shard in plan.shards if shard.name in names]


def batch_merged(path: Path, batch: str) -> list[PlannedMerge]:
    """Merged pairs of a `merge` batch of the plan in a file.

    Raises:
        UserError: the file is not a plan, or has no such batch.
    """
    plan = read_plan(path)
    names = _members(path, plan.merge_batches, batch)
    return [pair for pair in plan.merged if pair.name in names]


def shard_prefixes(merged: PlannedMerge, folder: Path) -> list[Path]:
    """Prefixes of the shards' pairs that a merged pair is made of, below the folder of shards."""
    suffix = f"_{merged.key}" if merged.key else ""
    return [folder / f"{shard}{suffix}" for shard in merged.shards]


def _members(path: Path, batches: tuple[JobBatch, ...], name: str) -> set[str]:
    for batch in batches:
        if batch.name == name:
            return set(batch.members)
    known = f"{batches[0].name} to {batches[-1].name}" if batches else "none"
    raise UserError(f"--batch {name}: {path} has no such batch; it has {known}")
