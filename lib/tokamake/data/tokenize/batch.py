"""Tokenize files into one shard, or a job batch of a plan into its shards.

`ShardTokenizer` skips shards that are complete and up to date, and encodes again with the reference
tokenizer if the fast encoder is wrong; `shard` writes each shard.
"""

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.data import readers
from tokamake.data.corpus.document_rows import read_duplicates
from tokamake.data.corpus.plan_file import batch_shards
from tokamake.data.corpus.stamps import open_unchanged, read_stamp
from tokamake.data.indexed import job_batch
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import quarantine_path
from tokamake.data.tokenize.encoder import Encoder, Mismatch
from tokamake.data.tokenize.shard import (
    ShardOptions,
    ShardWriter,
    dataset_files,
    dataset_prefixes,
)
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.runtime.console import counted


@dataclass(frozen=True)
class ShardRequest:
    """A shard to write."""

    output: Path
    """Prefix of its indexed datasets."""
    paths: list[Path]
    """Raw files."""
    byte_range: str = ""
    """Part of a single raw file, START:END, or empty."""
    duplicates: npt.NDArray[np.int64] | None = None
    """Ordinals of documents to leave out."""
    stamps: tuple[str, ...] = ()
    """Stamp of each raw file in the plan; empty without a plan."""


class ShardTokenizer:
    """Writes shards; loads the fast encoder once for all of them."""

    def __init__(self, tokenizer: Tokenizer, options: ShardOptions, *, workers: int) -> None:
        if options.prepend_bos and tokenizer.bos is None:
            raise UserError("--prepend-bos: the tokenizer has no BOS token; remove the option")
        self.options = options
        self._tokenizer = tokenizer
        self._workers = workers
        self._encoder = Encoder(tokenizer, workers=workers)
        self._reported_reason = ""

    def write_if_needed(self, shard: ShardRequest) -> None:
        """Write a shard unless it is complete and made from the same inputs and options."""
        request = self._request_digest(shard)
        prefixes = dataset_prefixes(shard.output, self.options.fields)
        if job_batch.finished(prefixes, request) and self._is_tolerable(prefixes[0]):
            print(f"{shard.output}: already complete")
        else:
            self.write(shard, request)

    def write(self, shard: ShardRequest, request: str = "") -> None:
        """Write a shard; a second time, with the reference tokenizer, if the fast encoder is wrong.

        Args:
            shard: what to read and where to write.
            request: digest for the manifests.
        """
        _check_output(shard, dataset_prefixes(shard.output, self.options.fields))
        manifests, mismatch = [], ""
        try:
            manifests = self._write_once(shard, request)
        except Mismatch as error:
            mismatch = str(error)
        # Outside the except block: the traceback would keep the first attempt's arrays in memory.
        if mismatch:
            print(
                f"tokenize: {mismatch}; re-encoding with the reference tokenizer", file=sys.stderr
            )
            self._encoder = Encoder(self._tokenizer, workers=self._workers, fast=False)
            manifests = self._write_once(shard, request)
        reason = self._encoder.known_fallback_reason
        if reason not in ("", self._reported_reason):
            self._reported_reason = reason
            print(f"encoded by {self._encoder.name}, not by gigatoken: {reason}")
        for manifest in manifests:
            print(_summary_line(shard.output, manifest, has_keys=len(manifests) > 1))

    def _write_once(self, shard: ShardRequest, request: str) -> list[dict[str, Any]]:
        byte_range = readers.parse_range(shard.byte_range, shard.paths)
        writer = ShardWriter(
            open_unchanged(
                shard.paths, shard.stamps, byte_range=byte_range, format=self.options.format
            ),
            shard.output,
            tokenizer=self._tokenizer,
            encoder=self._encoder,
            options=self.options,
            duplicates=shard.duplicates,
        )
        return writer.write(request)

    def _is_tolerable(self, prefix: Path) -> bool:
        """Whether a finished shard has no more bad documents than the options allow."""
        manifest = read_manifest(prefix)
        num_bad = manifest["quarantined_documents"]
        if self.options.on_bad_document == "stop":
            return num_bad == 0
        return num_bad <= self.options.max_bad_fraction * manifest["documents_in"]

    def _request_digest(self, shard: ShardRequest) -> str:
        """Digest of everything that decides the content of a shard.

        It excludes the policy for bad documents: a user who turns to quarantine at the first bad
        document keeps all shards that have none.
        """
        options = asdict(self.options)
        del options["on_bad_document"], options["max_bad_fraction"]
        return digest(
            {
                "inputs": [_file_stamp(path) for path in shard.paths],
                "byte_range": shard.byte_range,
                "tokenizer": self._tokenizer.fingerprint,
                "options": options,
                "duplicates": None if shard.duplicates is None else shard.duplicates.tolist(),
            }
        )


def tokenize_files(
    tokenizer: ShardTokenizer, files: Iterable[str], *, output: Path, byte_range: str = ""
) -> None:
    """Tokenize raw files into one shard; an earlier shard of this prefix is replaced.

    Args:
        tokenizer: tokenizer, options and encoder.
        files: files, folders and glob patterns.
        output: prefix of the shard.
        byte_range: START:END of a single file, or empty.

    Raises:
        UserError: a file is missing or damaged, or a document is bad.
    """
    tokenizer.write(ShardRequest(output, readers.expand(files), byte_range))


def tokenize_batch(
    tokenizer: ShardTokenizer,
    plan: Path,
    *,
    batch: str,
    folder: Path,
    summary: Path,
    duplicates: Path | None = None,
) -> None:
    """Tokenize the shards of a job batch that are not complete yet, then write the batch file.

    Args:
        tokenizer: tokenizer, options and encoder.
        plan: plan.json.
        batch: name of a `tokenize` batch in the plan.
        folder: folder of shards.
        summary: batch file to write.
        duplicates: file of `find_duplicates` with documents to leave out.

    Raises:
        UserError: one or more shards failed, for example because a raw file changed since it was
            planned; the others are written.
    """
    shards = [
        ShardRequest(
            folder / shard.name,
            [Path(path) for path in shard.files],
            shard.byte_range,
            None if duplicates is None else read_duplicates(duplicates, shard.name),
            shard.stamps,
        )
        for shard in batch_shards(plan, batch)
    ]
    job_batch.make_each(shards, tokenizer.write_if_needed)
    fields = tokenizer.options.fields
    prefixes = [prefix for shard in shards for prefix in dataset_prefixes(shard.output, fields)]
    job_batch.write_batch(summary, batch, folder=folder, prefixes=prefixes)


def _check_output(shard: ShardRequest, prefixes: list[Path]) -> None:
    """Raise UserError if the shard would overwrite one of its raw files."""
    outputs = [
        path for prefix in prefixes for path in (*dataset_files(prefix), quarantine_path(prefix))
    ]
    existing = [path for path in outputs if path.exists()]
    for path in shard.paths if existing else []:
        # samefile, because links and relative paths give one file several names.
        if any(path.samefile(output) for output in existing):
            raise UserError(f"{path}: is both input and output; name another --output")


def _file_stamp(path: Path) -> list[Any]:
    """Path, size and modification time: a changed file of the same name has another stamp."""
    return [str(path), *map(int, read_stamp(path).split(":"))]


def _summary_line(output: Path, manifest: dict[str, Any], *, has_keys: bool) -> str:
    name = f"{output}_{manifest['text_key']}" if has_keys else f"{output}"
    input_bytes = sum(source["bytes"] for source in manifest["inputs"])
    documents = counted(manifest["documents"], "document")
    tokens = counted(manifest["tokens"], "token")
    parts = [
        f"{name}: {documents}, {tokens} from {counted(len(manifest['inputs']), 'file')}, "
        f"{input_bytes / 1e6:,.1f} MB in {manifest['seconds']:.1f} s"
    ]
    for key in ("empty", "quarantined", "duplicate"):
        if num_documents := manifest[f"{key}_documents"]:
            parts.append(f"{num_documents:,} {key}")
    return "; ".join(parts)
