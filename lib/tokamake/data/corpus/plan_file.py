"""The plan and its file plan.json: shards, merged datasets, and job batches of both."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tokamake.errors import UserError
from tokamake.files import read_json, write_text
from tokamake.remote.addresses import RemoteFile


class PlannedShard(NamedTuple):
    """Raw files, or a byte range of one, that one tokenization reads."""

    name: str
    """<corpus>/<number>: prefix of the shard, below the folder of shards."""
    files: tuple[str, ...]
    """Raw files in order."""
    byte_range: str
    """Part of a single large file, START:END, or empty."""
    bytes: int
    """Estimated size of its .bin file."""
    stamp: str
    """Sizes and modification times of the raw files, from `raw_files.stamp`."""
    stamps: tuple[str, ...] = ()
    """Stamp of each raw file, for the jobs that read it; empty in plans of earlier versions."""

    @property
    def corpus(self) -> str:
        return self.name.partition("/")[0]


class PlannedMerge(NamedTuple):
    """An indexed dataset that `merge` writes from neighbouring shards, or links to."""

    name: str
    """<corpus>-<number>_<text key>_document (or _sentence), as Megatron names datasets."""
    corpus: str
    key: str
    """Text key, if shards have a dataset for each of several keys; else empty."""
    shards: tuple[str, ...]
    """Names of its shards in order."""
    dataset: str = ""
    """Prefix of the indexed dataset that it links to, in place of shards."""
    stamp: str = ""
    """Stamp of this dataset, from `dataset_files`."""


class JobBatch(NamedTuple):
    """Neighbouring shards or merged datasets that one job writes."""

    name: str
    """<corpus>-<number>."""
    members: tuple[str, ...]
    """Names of its shards or merged datasets."""

    @property
    def corpus(self) -> str:
        """Name of the first corpus; several share a job if there are more corpora than jobs."""
        return self.name.rpartition("-")[0]


class TokenizerCorpus(NamedTuple):
    """Raw files of a corpus that a tokenizer is trained on, and how to read them."""

    corpus: str
    format: str
    """Format of the files; empty: detected for each file."""
    text_key: str
    template: str
    """Template that joins several keys to one text, or empty."""
    files: tuple[str, ...]
    """Paths of the first plan that still exist."""


class PlannedDownload(NamedTuple):
    """A file behind an address in the table of corpora: a `RemoteFile` when the plan was made."""

    address: str
    """Address in the table of corpora; it may stand for many files."""
    url: str
    path: str
    size: int
    version: str

    @property
    def file(self) -> RemoteFile:
        return RemoteFile(*self[1:])


class Plan(NamedTuple):
    """All work on the raw files."""

    settings: dict[str, Any]
    """Sizes of the plan; other sizes need a plan from scratch."""
    tokenizer_stamp: str
    """Hash of the tokenizer's training files; it does not change with files that come or go."""
    tokenizer: tuple[TokenizerCorpus, ...]
    """Files that a tokenizer is trained on; later files must not change finished tokens."""
    tokenize_batches: tuple[JobBatch, ...]
    """Shards of each job."""
    merge_batches: tuple[JobBatch, ...]
    """Merged datasets of each job."""
    merged: tuple[PlannedMerge, ...]
    shards: tuple[PlannedShard, ...]
    downloads: tuple[PlannedDownload, ...] = ()
    """Raw files behind addresses."""
    keep_shards: bool = True
    """Whether shards stay after they are merged."""


_ITEM_TYPES: dict[str, type[Any]] = {
    "tokenizer": TokenizerCorpus,
    "tokenize_batches": JobBatch,
    "merge_batches": JobBatch,
    "merged": PlannedMerge,
    "shards": PlannedShard,
    "downloads": PlannedDownload,
}


_SEAL = b',\n"sha256": "'
"""Before the hash of all bytes above it. Unlike `files.write_sealed_json`, it costs no time."""


def _seal_end(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def read_plan(path: Path) -> Plan:
    """Read a plan."""
    remedy = "restore it, or remove it to plan from scratch"
    try:
        text = path.read_bytes()
        body, seal, end = text.rpartition(_SEAL)  # plans of earlier versions have none
        if seal and end != _seal_end(body):
            raise UserError(f"{path}: damaged: does not match its sha256; {remedy}")
        value = orjson.loads(text)  # several times faster than json
    except (FileNotFoundError, orjson.JSONDecodeError):
        # orjson refuses file names that are not UTF-8; `read_json` reads them.
        value = read_json(path, remedy if path.exists() else "make it with `tokamake plan`")
    try:
        value.pop("sha256", None)
        value.setdefault("downloads", [])  # plans of earlier versions have none
        for name, item_type in _ITEM_TYPES.items():
            items = value[name]
            for index, fields in enumerate(items):
                # In place, because a plan may have 100,000 shards.
                items[index] = _read_item(item_type, fields)
            value[name] = tuple(items)
        return Plan(**value)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a plan ({error}); {remedy}") from None


def _read_item(item_type: type[Any], fields: dict[str, Any]) -> Any:
    for key, value in fields.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    return item_type(**fields)


def write_plan(path: Path, plan: Plan) -> None:
    """Write a plan, one item per line, unless the file has the same content already."""
    parts = []
    for name, value in plan._asdict().items():
        if name in _ITEM_TYPES:
            lines = ",\n".join(json.dumps(item._asdict()) for item in value)
            parts.append(f'"{name}": [\n{lines}\n]')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    body = ("{\n" + ",\n".join(parts)).encode()
    text = body + _SEAL + _seal_end(body)
    if not path.is_file() or path.read_bytes() != text:
        write_text(path, text.decode())


def batch_shards(path: Path, batch: str) -> list[PlannedShard]:
    plan = read_plan(path)
    names = _member_names(path, plan.tokenize_batches, name=batch)
    return [shard for shard in plan.shards if shard.name in names]


def batch_merged(path: Path, batch: str) -> list[PlannedMerge]:
    plan = read_plan(path)
    names = _member_names(path, plan.merge_batches, name=batch)
    return [merge for merge in plan.merged if merge.name in names]


def shard_prefixes(merged: PlannedMerge, folder: Path) -> list[Path]:
    """Return the prefixes of a merged dataset's shards, below the folder of shards."""
    suffix = f"_{merged.key}" if merged.key else ""
    return [folder / f"{shard}{suffix}" for shard in merged.shards]


def _member_names(path: Path, batches: tuple[JobBatch, ...], *, name: str) -> set[str]:
    for batch in batches:
        if batch.name == name:
            return set(batch.members)
    names = f"{batches[0].name} to {batches[-1].name}" if batches else "none"
    raise UserError(f"--batch {name}: {path} has no such batch; it has {names}")
