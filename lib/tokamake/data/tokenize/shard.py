"""Write one shard: read raw files, encode their documents, write an indexed dataset per text key.

`readers` parse blocks of documents. While one block is parsed, threads encode earlier ones, and
`DatasetWriter` writes their tokens in order. Memory holds two document batches more than there are
threads, whatever the size of the files.
"""

import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tokamake import __version__
from tokamake._csrc import pack
from tokamake.data.corpus import documents, sentences
from tokamake.data.corpus.quarantine import Quarantine
from tokamake.data.indexed.dataset import DatasetWriter, token_dtype
from tokamake.data.indexed.document_sources import SourcesWriter, sources_path
from tokamake.data.indexed.manifest import sizes_and_hashes, write_manifest
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path, quarantine_path
from tokamake.data.readers import Input
from tokamake.data.tokenize.document_batch import (
    DocumentBatch,
    EncodedBatch,
    merge_small_batches,
    utf8_bytes,
)
from tokamake.data.tokenize.encoder import Encoder
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.files import atomic
from tokamake.runtime.console import progress


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How documents become sequences, and what to do with bad documents.

    The manifest lists all fields under these names.
    """

    fields: documents.Fields
    format: str = ""
    append_eod: bool = True
    prepend_bos: bool = False
    special_tokens_in_text: Literal["special", "plain"] = "special"
    split_sentences: bool = False
    language: str = "en"
    empty_documents: Literal["skip", "keep"] = "skip"
    on_bad_document: Literal["stop", "quarantine"] = "stop"
    max_bad_fraction: float = 0.01
    megatron_names: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise UserError(f"--language {self.language}: give an ISO 639 code, such as en or deu")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UserError(
                f"--max-bad-fraction {self.max_bad_fraction:g}: give a fraction from 0 to 1"
            )
        names = self.fields.names
        if (len(names) > 1 or self.megatron_names) and any("/" in name for name in names):
            raise UserError(
                f"--text-key {','.join(names)}: keys become parts of file names; use keys without /"
            )


def dataset_prefixes(output: Path, options: ShardOptions) -> list[Path]:
    """Return the prefixes of a shard: PREFIX, or PREFIX_<key> for each of several keys.

    Megatron's preprocess_data.py always adds the key, and `document` or `sentence`.
    """
    names = options.fields.names
    if len(names) == 1 and not options.megatron_names:
        return [output]
    level = "_sentence" if options.split_sentences else "_document"
    end = level if options.megatron_names else ""
    return [output.with_name(f"{output.name}_{name}{end}") for name in names]


def dataset_files(prefix: Path) -> tuple[Path, ...]:
    """Return the files of an indexed dataset; the manifest, which vouches for them, comes last."""
    return bin_path(prefix), idx_path(prefix), sources_path(prefix), manifest_path(prefix)


class ShardWriter:
    """Writes the indexed datasets of a shard.

    Each raw file is opened after the one before it is finished. `duplicates` are the ordinals of
    documents to leave out, ascending, counted over all inputs.
    """

    def __init__(
        self,
        inputs: Iterable[Input],
        output: Path,
        *,
        tokenizer: Tokenizer,
        encoder: Encoder,
        options: ShardOptions,
        duplicates: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._inputs = inputs
        self._output = output
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._options = options
        self._duplicates = np.zeros(0, np.int64) if duplicates is None else duplicates
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._num_read = self._num_duplicates = 0
        self._opened: list[Input] = []
        self._input_entries: list[dict[str, Any]] = []

    def write(self, request: str = "") -> list[dict[str, Any]]:
        """Write all indexed datasets or none; return their manifests, which state `request`.

        Mismatch: the fast encoder is wrong for this text.
        """
        started = time.monotonic()
        prefixes = dataset_prefixes(self._output, self._options)
        quarantine_file = quarantine_path(prefixes[0])
        # Manifests are last: `atomic` renames in this order, and a manifest vouches for the rest.
        paths = [path for prefix in prefixes for path in dataset_files(prefix)[:-1]]
        paths += [quarantine_file, *(dataset_files(prefix)[-1] for prefix in prefixes)]
        with atomic(*paths, optional=[quarantine_file], vouching=len(prefixes)) as temporaries:
            temporary = dict(zip(paths, temporaries, strict=True))
            quarantine = Quarantine(temporary[quarantine_file])
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
                self._write_documents(outputs, quarantine)
            self._check_bad_fraction(
                quarantine, num_bad=quarantine.documents, num_documents=self._num_read
            )
            return self._write_manifests(outputs, quarantine, request=request, started=started)

    def _write_documents(self, outputs: "list[_Output]", quarantine: Quarantine) -> None:
        keep_empty = self._options.empty_documents == "keep"
        batches = merge_small_batches(self._read_documents(quarantine))
        # closing: an error below must stop the threads at once, not when the generator is freed.
        with closing(self._encode_ahead(batches)) as encoded_batches:
            for batch, columns in progress(
                encoded_batches,
                label=f"tokenize {self._output.name}",
                unit="documents",
                size=lambda item: len(item[0].inputs),
                num_bytes=lambda item: sum(encoded.text_bytes for encoded in item[1]),
            ):
                for output, encoded in zip(outputs, columns, strict=True):
                    output.add(batch, encoded, keep_empty=keep_empty)

    def _read_documents(self, quarantine: Quarantine) -> Iterator[DocumentBatch]:
        """Yield the good documents of all inputs; stop at a bad one or quarantine it."""
        fields = self._options.fields
        for input_index, source in enumerate(self._inputs):
            self._opened.append(source)
            for block in source.blocks(fields.read_keys):
                texts = documents.texts(block, fields)
                is_kept = self._is_not_duplicate(texts.kept)
                for index, reason in texts.bad:
                    if self._options.on_bad_document == "stop":
                        place = documents.place(source, block, index)
                        raise UserError(f"{place}: {reason}, or set on_bad_document to quarantine")
                    quarantine.add(source, block, index, reason)
                self._num_read += len(block.records)
                indices = texts.kept[is_kept]
                columns = texts.columns
                if len(indices) != len(texts.kept):
                    kept = is_kept.nonzero()[0].tolist()
                    columns = tuple([column[index] for index in kept] for column in columns)
                yield DocumentBatch(
                    columns,
                    np.full(len(indices), input_index, np.int64),
                    block.numbers[indices],
                    block.offsets[indices],
                )
            self._check_file(source, quarantine)
            entry = _input_entry(source) | {"quarantined": quarantine.documents_of(source)}
            self._input_entries.append(entry)

    def _is_not_duplicate(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return a mask of a block's good documents that are not duplicates, and count the rest."""
        if not len(self._duplicates):
            return np.ones(len(indices), bool)
        mask = ~np.isin(indices + self._num_read, self._duplicates, assume_unique=True)
        self._num_duplicates += int(len(indices) - mask.sum())
        return mask

    def _check_file(self, source: Input, quarantine: Quarantine) -> None:
        """Refuse a file without good documents, or with too many bad ones.

        A text file is one document: the fraction of the shard counts those.
        """
        if source.format == "text" or not (num_bad := quarantine.documents_of(source)):
            return
        if num_bad == source.documents and not source.start and source.end is None:
            raise UserError(
                f"{quarantine.first}; no document of the file is good: it is damaged, or its "
                "text_key or format is wrong; fetch it again or leave it out"
            )
        self._check_bad_fraction(
            quarantine, num_bad=num_bad, num_documents=source.documents, where=" of the file"
        )

    def _check_bad_fraction(
        self, quarantine: Quarantine, *, num_bad: int, num_documents: int, where: str = ""
    ) -> None:
        limit = self._options.max_bad_fraction
        if num_bad > limit * num_documents:
            raise UserError(
                f"{quarantine.first}; {num_bad:,} of {num_documents:,} documents{where} are bad, "
                f"more than max_bad_fraction {limit:g}: fix them or raise it"
            )

    def _encode_ahead(
        self, batches: Iterable[DocumentBatch]
    ) -> Generator[tuple[DocumentBatch, list[EncodedBatch]], None, None]:
        """Encode batches in threads and yield them in order; threads work ahead of the consumer."""
        pending: deque[tuple[DocumentBatch, list[Future[EncodedBatch]]]] = deque()
        pool = ThreadPoolExecutor(self._encoder.threads)
        try:
            for batch in batches:
                # The stream position is taken here, in order: it decides which texts are checked.
                futures = [
                    pool.submit(self._encode, batch, texts, self._encoder.reserve(texts))
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

    def _encode(self, batch: DocumentBatch, texts: Sequence[str], position: range) -> EncodedBatch:
        """Encode a column of documents; runs in a thread and changes no state of the writer."""
        parts, counts = texts, np.ones(len(texts), np.int64)
        if self._options.split_sentences:
            parts, counts = sentences.split(list(texts), self._options.language)
        try:
            ids, lengths = self._encoder(parts, position)
        except UserError:
            self._check_each(batch, texts)
            raise
        # Drop sequences without tokens, and count how many each document has left.
        document = np.repeat(np.arange(len(texts)), counts)[lengths > 0]
        counts = np.bincount(document, minlength=len(texts))
        return EncodedBatch(ids, lengths[lengths > 0], counts, utf8_bytes(texts))

    def _check_each(self, batch: DocumentBatch, texts: Sequence[str]) -> None:
        """Raise UserError with the place of the first document that cannot be encoded."""
        for index, text in enumerate(texts):
            try:
                self._tokenizer.encode_batch([text])
            except UserError as error:
                source = self._opened[batch.inputs[index]]
                place = source.place(int(batch.numbers[index]), int(batch.offsets[index]))
                raise UserError(f"{place}: {error}") from None

    def _write_manifests(
        self, outputs: "list[_Output]", quarantine: Quarantine, *, request: str, started: float
    ) -> list[dict[str, Any]]:
        common = self._common_manifest(quarantine, request)
        manifests: list[dict[str, Any]] = []
        for output, key in zip(outputs, self._options.fields.names, strict=True):
            manifest = {**common, "text_key": key, **output.counts()}
            assert self._num_read == self._num_duplicates + quarantine.documents + (
                manifest["documents"] + manifest["empty_documents"]
            )
            manifest["seconds"] = round(time.monotonic() - started, 3)
            # The shard has one quarantine file; the manifest of its first dataset lists it.
            is_first = not manifests
            extra = [quarantine.path] if quarantine.documents and is_first else []
            manifests.append({**manifest, **output.sizes_and_hashes(*extra)})
            write_manifest(output.paths[-1], manifests[-1])
        return manifests

    def _common_manifest(self, quarantine: Quarantine, request: str) -> dict[str, Any]:
        options = asdict(self._options)
        del options["fields"]  # text_key and template stand for it
        del options["megatron_names"]
        return {
            "tokamake": __version__,
            "request": request,
            "inputs": self._input_entries,
            "tokenizer": self._tokenizer.fingerprint,
            "encoder": self._encoder.name,
            "vocab_size": self._tokenizer.vocab_size,
            "eod": self._tokenizer.eod,
            "bos": self._tokenizer.bos,
            "dtype": self._dtype.__name__,
            "template": self._options.fields.template,
            **options,
            "documents_in": self._num_read,
            "quarantined_documents": quarantine.documents,
            "duplicate_documents": self._num_duplicates,
        }


def _input_entry(source: Input) -> dict[str, Any]:
    """Return the manifest's entry of a raw file that was read to its end."""
    is_whole_file = source.start == 0 and source.end is None
    return {
        "path": str(source.path),
        "format": source.format,
        "compression": source.compression,
        "unit": source.unit,
        "byte_range": None if is_whole_file else [source.start, source.end],
        "bytes": source.bytes,
        "sha256": source.sha256,
        "documents": source.documents,
        "blank_lines": source.blank_lines,
    }


class _Output:
    """Writers of one indexed dataset."""

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
        self._writer.add(*self._with_bos_and_eod(encoded), encoded.counts[kept])
        self._sources.add(batch.inputs[kept], batch.numbers[kept], batch.offsets[kept])

    def _with_bos_and_eod(
        self, encoded: EncodedBatch
    ) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        """Return tokens with bos and eod in the dataset's dtype, and the lengths of sequences."""
        counts = encoded.counts[encoded.counts > 0]
        ends = counts.cumsum()
        lengths = encoded.lengths.copy()
        # bos and eod frame documents, not sequences: `pack` needs the tokens of each document.
        document_lengths = np.add.reduceat(lengths, ends - counts) if len(counts) else lengths
        lengths[ends - 1] += self._eod is not None
        lengths[ends - counts] += self._bos is not None
        bos, eod = (-1 if token is None else token for token in (self._bos, self._eod))
        tokens = pack(encoded.ids, document_lengths, bos=bos, eod=eod, dtype=self._dtype)
        return tokens, lengths

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
        """Return sizes and hashes of the dataset's files and of extra files."""
        bin_sha256 = self._writer.sha256.hexdigest()  # computed while writing
        return sizes_and_hashes(*self.paths[:-1], *extra, bin_sha256=bin_sha256)

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *error: Any) -> None:
        self._sources.__exit__(*error)
        self._writer.__exit__(*error)
