"""Write shards one after another: skip shards that are up to date, load the encoder once.

If the fast encoder is wrong, a shard is encoded again with the reference tokenizer.
"""

import hashlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.data import readers
from tokamake.data.indexed import job_batch
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import quarantine_path
from tokamake.data.readers import is_one_document, open_unchanged, read_stamp
from tokamake.data.tokenize.encoder import Encoder, Mismatch
from tokamake.data.tokenize.shard import ShardWriter
from tokamake.data.tokenize.shard_options import (
    ShardOptions,
    ShardRequest,
    dataset_files,
    dataset_prefixes,
)
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from tokamake.data.filters._run_and_count import LoadedFilter


class ShardTokenizer:
    """Writes shards; loads the fast encoder once for all of them. `workers` 0 uses all cores."""

    def __init__(self, tokenizer: Tokenizer, options: ShardOptions, *, workers: int) -> None:
        if workers < 0:
            raise UserError(f"--workers {workers}: give a number of threads, or 0 for all cores")
        if options.prepend_bos and tokenizer.bos is None:
            raise UserError("--prepend-bos: the tokenizer has no BOS token; remove the option")
        if options.special_tokens_in_text == "plain":
            tokenizer.read_special_tokens_as_text()
        self.options = options
        self._tokenizer = tokenizer
        self._workers = workers or len(os.sched_getaffinity(0))
        self._encoder = Encoder(tokenizer, workers=self._workers)
        self._filters: list[LoadedFilter] = []
        if options.filters:
            from tokamake.data.filters._run_and_count import (
                load_filters,  # imports pydantic: 0.25 s
            )

            self._filters = load_filters(options.filters)
        self._are_set_up = False
        self._reported_reason = ""

    def write_if_needed(self, shard: ShardRequest) -> None:
        """Write a shard unless it is complete and made from the same inputs and options."""
        request = self._request_digest(shard)
        prefixes = dataset_prefixes(shard.output, self.options)
        if job_batch.finished(prefixes, request) and self._is_tolerable(prefixes[0]):
            print(f"{shard.output}: already complete")
        else:
            self.write(shard, request)

    def write(self, shard: ShardRequest, request: str = "", *, explain: bool = False) -> None:
        """Write a shard; again with the reference tokenizer if the fast encoder is wrong.

        `explain` also prints which encoder was used, how fast it was, and why not the fast one.
        """
        _check_output(shard, dataset_prefixes(shard.output, self.options))
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
            self._encoder = Encoder(
                self._tokenizer, workers=self._workers, fast=False, reason=mismatch
            )
            manifests = self._write_once(shard, request)
        reason = self._encoder.known_fallback_reason
        if reason not in ("", self._reported_reason):
            self._reported_reason = reason
            print(f"encoded by {self._encoder.name}, not by the fast encoder: {reason}")
        prefixes = dataset_prefixes(shard.output, self.options)
        for prefix, manifest in zip(prefixes, manifests, strict=True):
            print(_summary_line(prefix, manifest))
        if explain:
            text_bytes = sum(manifest["text_bytes"] for manifest in manifests)
            print("\n".join(self._encoder.explain(text_bytes)))

    def _write_once(self, shard: ShardRequest, request: str) -> list[dict[str, Any]]:
        byte_range = readers.parse_range(shard.byte_range, shard.paths)
        self._set_up_filters()
        writer = ShardWriter(
            open_unchanged(
                shard.paths,
                shard.stamps,
                byte_range=byte_range,
                format=self.options.format,
                workers=self._workers,
            ),
            shard,
            tokenizer=self._tokenizer,
            encoder=self._encoder,
            options=self.options,
            filters=self._filters,
        )
        return writer.write(request)

    def _set_up_filters(self) -> None:
        """Set up the filters before the first shard: it may load models."""
        if self._filters and not self._are_set_up:
            from tokamake.data.filters._run_and_count import set_up  # imports pydantic: 0.25 s

            set_up(self._filters)
        self._are_set_up = True

    def _is_tolerable(self, prefix: Path) -> bool:
        """Whether a finished shard has no more bad documents than the options allow."""
        manifest = read_manifest(prefix)
        num_bad, limit = manifest["quarantined_documents"], self.options.max_bad_fraction
        if self.options.on_bad_document == "stop":
            return num_bad == 0
        if self._had_less_time(manifest):
            return False
        return num_bad <= limit * manifest["documents_in"] and all(
            is_one_document(file["format"])
            or file.get("quarantined", 0) <= limit * file["documents"]
            for file in manifest["inputs"]
        )

    def _had_less_time(self, manifest: Mapping[str, Any]) -> bool:
        """Whether filters were interrupted that may run longer now."""
        seconds = self.options.filter_seconds or math.inf
        return manifest.get("filter_seconds", seconds) < seconds and any(
            "time limit" in counts.get("quarantined", ()) for counts in manifest["filters"]
        )

    def _request_digest(self, shard: ShardRequest) -> str:
        """Digest of everything that decides the content of a shard.

        It excludes the policy for bad documents and the time limit of filters: a user who turns to
        quarantine at the first bad document keeps all shards that have none.
        """
        options = asdict(self.options)
        del options["on_bad_document"], options["max_bad_fraction"], options["megatron_names"]
        if options["special_tokens_in_text"] == "special":
            del options["special_tokens_in_text"]  # so that shards of earlier versions stay valid
        del options["filters"], options["filter_seconds"]
        if self._filters:
            options["filters"] = [[*loaded[:3]] for loaded in self._filters]
        repeats = shard.repeats
        return digest(
            {
                "inputs": [_file_stamp(path) for path in shard.paths],
                "byte_range": shard.byte_range,
                "tokenizer": self._tokenizer.fingerprint,
                "options": options,
                "duplicates": None if shard.duplicates is None else shard.duplicates.tolist(),
                **(
                    {} if repeats is None else {"repeats": hashlib.sha256(repeats.data).hexdigest()}
                ),
            }
        )


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


def _summary_line(prefix: Path, manifest: dict[str, Any]) -> str:
    input_bytes = sum(source["bytes"] for source in manifest["inputs"])
    documents = counted(manifest["documents"], "document")
    tokens = counted(manifest["tokens"], "token")
    parts = [
        f"{prefix}: {documents}, {tokens} from {counted(len(manifest['inputs']), 'file')}, "
        f"{input_bytes / 1e6:,.1f} MB in {manifest['seconds']:.1f} s"
    ]
    if num_skipped := sum(sum(file.get("skipped", {}).values()) for file in manifest["inputs"]):
        parts.append(f"{num_skipped:,} skipped because they are no documents")
    for key in ("empty", "quarantined", "duplicate", "filtered"):
        if num_documents := manifest.get(f"{key}_documents"):
            parts.append(f"{num_documents:,} {key}")
    return "; ".join(parts)
