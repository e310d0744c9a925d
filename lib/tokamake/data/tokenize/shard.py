"""Write one shard: read raw files, encode their documents, write an indexed dataset per text key.

`readers` parse blocks of documents. While one block is parsed, threads encode earlier ones, and
`DatasetWriter` writes their tokens in order. Memory holds two document batches more than there are
threads, whatever the size of the files.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokamake import __version__
from tokamake.data.corpus import sentences
from tokamake.data.indexed.dataset import DatasetWriter, token_dtype
from tokamake.data.indexed.document_sources import SourcesWriter
from tokamake.data.indexed.manifest import sizes_and_hashes, write_manifest
from tokamake.data.indexed.manifest_counts import count_faults
from tokamake.data.indexed.paths import quarantine_path
from tokamake.data.readers import Input
from tokamake.data.tokenize.document_ends import framed
from tokamake.data.tokenize.encoder import Encoder
from tokamake.data.tokenize.shard_options import (
    ShardOptions,
    ShardRequest,
    dataset_files,
    dataset_prefixes,
)
from tokamake.data.tokenize.shard_reader import (
    DocumentBatch,
    EncodedBatch,
    Quarantine,
    ShardReader,
    merge_small_batches,
    utf8_bytes,
)
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.files import atomic
from tokamake.runtime.console import progress

if TYPE_CHECKING:
    from tokamake.data.filters._run_and_count import LoadedFilter


class ShardWriter:
    """Writes the indexed datasets of a shard; see `ShardReader` for documents that are left out."""

    def __init__(
        self,
        inputs: Iterable[Input],
        shard: ShardRequest,
        *,
        tokenizer: Tokenizer,
        encoder: Encoder,
        options: ShardOptions,
        filters: "Sequence[LoadedFilter]" = (),
    ) -> None:
        self._inputs = inputs
        self._shard = shard
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._options = options
        self._filters = filters
        self._dtype = token_dtype(tokenizer.vocab_size)

    def write(self, request: str = "") -> list[dict[str, Any]]:
        """Write all indexed datasets or none; return their manifests, which state `request`.

        Mismatch: the fast encoder is wrong for this text.
        """
        started = time.monotonic()
        prefixes = dataset_prefixes(self._shard.output, self._options)
        quarantine_file = quarantine_path(prefixes[0])
        # Manifests are last: `atomic` renames in this order, and a manifest vouches for the rest.
        paths = [path for prefix in prefixes for path in dataset_files(prefix)[:-1]]
        paths += [quarantine_file, *(dataset_files(prefix)[-1] for prefix in prefixes)]
        with atomic(*paths, optional=[quarantine_file], vouching=len(prefixes)) as temporaries:
            temporary = dict(zip(paths, temporaries, strict=True))
            quarantine = Quarantine(temporary[quarantine_file])
            reader = ShardReader(
                self._inputs,
                self._options,
                duplicates=self._shard.duplicates,
                near_duplicates=self._shard.near_duplicates,
                repeats=self._shard.repeats,
                filters=self._filters,
                quarantine=quarantine,
            )
            bos = self._tokenizer.bos if self._options.prepend_bos else None
            eod = self._tokenizer.eod if self._options.append_eod else None
            with ExitStack() as stack:
                stack.callback(quarantine.close)
                outputs = [
                    stack.enter_context(
                        _Output(
                            [temporary[path] for path in dataset_files(prefix)],
                            self._dtype,
                            bos=bos,
                            eod=eod,
                        )
                    )
                    for prefix in prefixes
                ]
                self._write_documents(outputs, reader)
            common = self._common_manifest(reader, request)
            return self._write_manifests(outputs, quarantine, common=common, started=started)

    def _write_documents(self, outputs: "list[_Output]", reader: ShardReader) -> None:
        keep_empty = self._options.empty_documents == "keep"
        # closing: an error below must stop the threads at once, not when the generator is freed.
        with closing(self._encode_ahead(reader)) as encoded_batches:
            for batch, columns in encoded_batches:
                for output, encoded in zip(outputs, columns, strict=True):
                    output.add(batch, encoded, keep_empty=keep_empty)

    def _encode_ahead(
        self, reader: ShardReader
    ) -> Generator[tuple[DocumentBatch, list[EncodedBatch]], None, None]:
        """Encode batches in threads, some in advance, and yield them in order."""
        pending: deque[tuple[DocumentBatch, list[Future[EncodedBatch]]]] = deque()
        pool = ThreadPoolExecutor(self._encoder.threads)
        try:
            # Documents that are read, not those that are written: filters may drop almost all.
            batches = progress(
                reader.batches(),
                label=f"tokenize {self._shard.output.name}",
                unit="documents",
                size=lambda batch: batch.num_read,
                num_bytes=lambda batch: batch.size_read,
            )
            for batch in merge_small_batches(batches):
                # The stream position is taken here, in order: it decides which texts are checked.
                futures = [
                    pool.submit(
                        self._encode,
                        reader,
                        batch,
                        texts=texts,
                        position=self._encoder.reserve(texts),
                    )
                    for texts in batch.columns
                ]
                pending.append((batch, futures))
                while len(pending) > self._encoder.threads:
                    oldest, futures = pending.popleft()
                    yield oldest, [future.result() for future in futures]
            while pending:
                oldest, futures = pending.popleft()
                yield oldest, [future.result() for future in futures]
        finally:
            # After an error, wait only for batches that a thread is encoding.
            pool.shutdown(cancel_futures=True)

    def _encode(
        self, reader: ShardReader, batch: DocumentBatch, *, texts: Sequence[str], position: range
    ) -> EncodedBatch:
        """Encode a column of documents; runs in a thread and changes no state of the writer."""
        parts, counts = texts, np.ones(len(texts), np.int64)
        if self._options.split_sentences:
            parts, counts = sentences.split(list(texts), self._options.language)
        try:
            ids, lengths = self._encoder(parts, position)
        except UserError:
            self._check_each(reader, batch, texts=texts)
            raise
        # Drop sequences without tokens, and count how many each document has left.
        document = np.repeat(np.arange(len(texts)), counts)[lengths > 0]
        counts = np.bincount(document, minlength=len(texts))
        return EncodedBatch(ids, lengths[lengths > 0], counts, utf8_bytes(texts))

    def _check_each(
        self, reader: ShardReader, batch: DocumentBatch, *, texts: Sequence[str]
    ) -> None:
        for index, text in enumerate(texts):
            try:
                self._tokenizer.encode_batch([text])
            except UserError as error:
                raise UserError(f"{reader.place(batch, index)}: {error}") from None

    def _write_manifests(
        self,
        outputs: "list[_Output]",
        quarantine: Quarantine,
        *,
        common: dict[str, Any],
        started: float,
    ) -> list[dict[str, Any]]:
        manifests: list[dict[str, Any]] = []
        for output, key in zip(outputs, self._options.fields.names, strict=True):
            manifest = {**common, "text_key": key, **output.counts()}
            assert not (faults := [*count_faults(manifest)]), faults
            manifest["seconds"] = round(time.monotonic() - started, 3)
            # The shard has one quarantine file; the manifest of its first dataset lists it.
            is_first = not manifests
            extra = [quarantine.path] if quarantine.documents and is_first else []
            manifests.append({**manifest, **output.sizes_and_hashes(*extra)})
            write_manifest(output.paths[-1], manifests[-1])
        return manifests

    def _common_manifest(self, reader: ShardReader, request: str) -> dict[str, Any]:
        options = asdict(self._options)
        del options["fields"]  # text_key and template stand for it
        del options["megatron_names"], options["filters"]
        if not self._filters:
            del options["filter_seconds"]
        reason = self._encoder.known_fallback_reason
        return {
            "tokamake": __version__,
            "request": request,
            "inputs": reader.entries,
            "tokenizer": self._tokenizer.fingerprint,
            "encoder": self._encoder.name,
            **({"encoder_fallback": reason} if reason else {}),
            "vocab_size": self._tokenizer.vocab_size,
            "eod": self._tokenizer.eod,
            "bos": self._tokenizer.bos,
            "dtype": self._dtype.__name__,
            "template": self._options.fields.template,
            **options,
            **reader.manifest(),
        }


class _Output:
    def __init__(
        self, paths: list[Path], dtype: type[np.integer], *, bos: int | None, eod: int | None
    ) -> None:
        self.paths = paths
        self._dtype, self._bos, self._eod = dtype, bos, eod
        self._writer = DatasetWriter(paths[0], paths[1], dtype=dtype)
        self._sources = SourcesWriter(paths[2])
        self._num_documents = self._num_empty = self._text_bytes = 0

    def add(self, batch: DocumentBatch, encoded: EncodedBatch, *, keep_empty: bool) -> None:
        """Append a batch, with or without its empty documents."""
        has_tokens = encoded.counts > 0
        num_documents = int(has_tokens.sum())
        self._num_documents += num_documents
        self._num_empty += len(has_tokens) - num_documents
        self._text_bytes += encoded.text_bytes
        kept = np.ones(len(has_tokens), bool) if keep_empty else has_tokens
        tokens, lengths = framed(encoded, self._dtype, bos=self._bos, eod=self._eod)
        self._writer.add(tokens, lengths, encoded.counts[kept])
        self._sources.add(batch.inputs[kept], batch.numbers[kept], batch.offsets[kept])

    def counts(self) -> dict[str, int]:
        """Return the counts of the manifest."""
        index = self._writer.index
        return {
            "documents": self._num_documents,
            "empty_documents": self._num_empty,
            "sequences": index.sequences,
            "tokens": index.tokens,
            "text_bytes": self._text_bytes,
        }

    def sizes_and_hashes(self, *extra: Path) -> dict[str, Any]:
        bin_sha256 = self._writer.sha256.hexdigest()  # computed while writing
        return sizes_and_hashes(*self.paths[:-1], *extra, bin_sha256=bin_sha256)

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *error: Any) -> None:
        self._sources.__exit__(*error)
        self._writer.__exit__(*error)
