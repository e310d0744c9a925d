"""Makes shards with one tokenizer: those of a batch that are not whole yet, or a single one.

`tokenize` asks; `shard` makes each; the manifest of a finished one tells what it was made from.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus import plan_file as corpus_plan_file
from tokamake.data.corpus.document_rows import read_duplicates
from tokamake.data.indexed import job_batch
from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.indexed.paths import quarantine_path
from tokamake.data.readers import open_input, parse_range
from tokamake.data.tokenize.encoder import Encoder, Mismatch
from tokamake.data.tokenize.shard import ShardOptions, ShardWriter, pair_files, prefixes
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.runtime.console import counted


@dataclass(frozen=True)
class ShardRequest:
    """One shard to make."""

    output: Path
    """Prefix of its pairs."""
    paths: list[Path]
    """Raw files."""
    byte_range: str = ""
    """Part of a single one, START:END."""
    duplicates: npt.NDArray[np.int64] | None = None
    """Ordinals of documents to leave out."""


class BatchTokenizer:
    """Makes shards; the fast encoder is loaded once for all of them."""

    def __init__(self, tokenizer: Tokenizer, options: ShardOptions, workers: int) -> None:
        if options.prepend_bos and tokenizer.bos is None:
            raise UserError("--prepend-bos: the tokenizer has no BOS token; leave it out")
        self._tokenizer = tokenizer
        self._options = options
        self._workers = workers
        self._encoder = Encoder(tokenizer, workers=workers)
        self._told = ""

    def make_batch(
        self, plan_file: Path, batch: str, folder: Path, *, summary: Path, duplicates: Path | None
    ) -> None:
        """Make the shards of a planned batch that are not whole yet, then write the batch file."""
        shards = [
            ShardRequest(
                folder / shard.name,
                [Path(path) for path in shard.files],
                shard.byte_range,
                None if duplicates is None else read_duplicates(duplicates, shard.name),
            )
            for shard in corpus_plan_file.batch_shards(plan_file, batch)
        ]
        job_batch.make_each(shards, self._make_if_needed)
        made = [p for shard in shards for p in prefixes(shard.output, self._options.fields)]
        job_batch.write_batch(summary, batch, folder, made)

    def _make_if_needed(self, shard: ShardRequest) -> None:
        request = self._request(shard)
        pairs_of = prefixes(shard.output, self._options.fields)
        if job_batch.finished(pairs_of, request) and self._tolerable(pairs_of[0]):
            print(f"{shard.output}: whole already")
        else:
            self.make(shard, request)

    def _tolerable(self, prefix: Path) -> bool:
        """Whether a finished shard has no more bad documents than is allowed by now."""
        stated = read_manifest(prefix)
        bad, limit = stated["quarantined_documents"], self._options.max_bad_fraction
        if self._options.on_bad_document == "stop":
            return bad == 0
        return bad <= limit * stated["documents_in"]

    def _request(self, shard: ShardRequest) -> str:
        """Digest of everything that a shard is made from.

        What is done about bad documents is no part of it: whoever turns to quarantine at the first
        one keeps all shards that have none.
        """
        dropped = shard.duplicates
        options = asdict(self._options)
        del options["on_bad_document"], options["max_bad_fraction"]
        return digest(
            {
                "inputs": [_stamp(path) for path in shard.paths],
                "byte_range": shard.byte_range,
                "tokenizer": self._tokenizer.fingerprint,
                "options": options,
                "duplicates": None if dropped is None else dropped.tolist(),
            }
        )

    def make(self, shard: ShardRequest, request: str = "") -> None:
        """Make one shard; once more with the tokenizer's own package if the fast encoder errs."""
        _refuse_loss(shard, prefixes(shard.output, self._options.fields))
        manifests, mismatch = [], ""
        try:
            manifests = self._make(shard, request)
        except Mismatch as error:
            mismatch = str(error)
        if mismatch:  # outside, where the error no longer keeps all that the first run held
            print(f"tokenize: {mismatch}; all of it once more, without", file=sys.stderr)
            self._encoder = Encoder(self._tokenizer, workers=self._workers, fast=False)
            manifests = self._make(shard, request)
        if self._encoder.refused not in ("", self._told):
            self._told = self._encoder.refused
            print(f"encoded by {self._encoder.name}, not by gigatoken: {self._told}")
        for manifest in manifests:
            print(_line(shard.output, manifest, several=len(manifests) > 1))

    def _make(self, shard: ShardRequest, request: str) -> list[dict[str, Any]]:
        byte_range = parse_range(shard.byte_range, shard.paths)
        made = ShardWriter(
            (
                open_input(path, byte_range=byte_range, format=self._options.format)
                for path in shard.paths
            ),
            shard.output,
            tokenizer=self._tokenizer,
            encoder=self._encoder,
            options=self._options,
            duplicates=shard.duplicates,
        )
        return made.make(request)


def _refuse_loss(shard: ShardRequest, targets: list[Path]) -> None:
    """Refuse an output that has the name of a raw file."""
    made = [path for target in targets for path in (*pair_files(target), quarantine_path(target))]
    found = [path for path in made if path.exists()]
    for path in shard.paths if found else []:
        if any(path.samefile(target) for target in found):
            raise UserError(f"{path}: is to be read and written; name another --output")


def _stamp(path: Path) -> list[Any]:
    """What tells a raw file from a changed one of the same name."""
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); put it back") from None
    return [str(path), found.st_size, found.st_mtime_ns]


def _line(output: Path, stated: dict[str, Any], *, several: bool) -> str:
    """One line on a pair: what came in and what came of it."""
    name = f"{output}_{stated['text_key']}" if several else f"{output}"
    size = sum(source["bytes"] for source in stated["inputs"])
    parts = [
        f"{name}: {counted(stated['documents'], 'document')}, {counted(stated['tokens'], 'token')} "
        f"from {counted(len(stated['inputs']), 'file')}, {size / 1e6:,.1f} MB in "
        f"{stated['seconds']:.1f} s"
    ]
    for key in ("empty", "quarantined", "duplicate"):
        if stated[f"{key}_documents"]:
            parts.append(f"{stated[f'{key}_documents']:,} {key}")
    return "; ".join(parts)
