"""One shard: raw files, read, tokenized and written as a pair, or as one pair for each text key.

Blocks of documents come from `readers`; while one is parsed, threads encode those before, and their
tokens go to `indexed.Writer`. Memory holds a batch a thread and two more, however large the files.
"""

import re
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from tokamake.data.readers import Input, RecordBlock, Utf8
from tokamake.data.tokenize.encoder import Encoder, extent
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.files import atomic

_BATCH_CHARACTERS = 2 << 20
"""Small enough for its buffers to be used again and again."""
_DOCUMENT_CHARACTERS = 64
"""What a document costs besides its text, in characters."""


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """What is made of the documents, and what is done about those that cannot be read."""

    fields: documents.Fields
    format: str = ""
    append_eod: bool = True
    prepend_bos: bool = False
    split_sentences: bool = False
    language: str = "en"
    empty_documents: Literal["skip", "keep"] = "skip"
    on_bad_document: Literal["stop", "quarantine"] = "stop"
    max_bad_fraction: float = 1.0

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z]{2,3}", self.language):
            raise UserError(f"--language {self.language}: give an ISO 639 code, as en or deu")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UserError(f"--max-bad-fraction {self.max_bad_fraction:g}: give a share, 0 to 1")


class DocumentBatch(NamedTuple):
    """Documents on their way to the encoder, and where they come from."""

    columns: tuple[Sequence[str], ...]
    """Texts for each output."""
    inputs: npt.NDArray[np.int64]
    """(documents,) index of the raw file."""
    numbers: npt.NDArray[np.int64]
    """(documents,) line or row."""
    offsets: npt.NDArray[np.int64]
    """(documents,) first byte of the line, or -1."""


class Tokens(NamedTuple):
    """Documents as the tokenizer has them."""

    ids: npt.NDArray[np.uint32]
    """(tokens,) of all sequences one after the other."""
    lengths: npt.NDArray[np.int64]
    """(sequences,) tokens of each sequence, at least one."""
    counts: npt.NDArray[np.int64]
    """(documents,) sequences of each document, 0 for an empty one."""
    text_bytes: int
    """UTF-8 bytes of the texts."""


def prefixes(output: Path, fields: documents.Fields) -> list[Path]:
    """Pairs of a shard: PREFIX, or PREFIX_<key> for each of several keys."""
    if len(fields.names) == 1:
        return [output]
    return [output.with_name(f"{output.name}_{name}") for name in fields.names]


def pair_files(prefix: Path) -> tuple[Path, ...]:
    """What a pair consists of; the manifest, which vouches for the others, comes last."""
    return (
        bin_path(prefix),
        idx_path(prefix),
        sources_path(prefix),
        manifest_path(prefix),
    )


class ShardWriter:
    """Turns inputs into pairs.

    Args:
        inputs: raw files in order, opened one after the other.
        output: prefix of the pairs.
        tokenizer: the tokenizer; `encoder` gives its ids.
        options: what is made of the documents.
        duplicates: ordinals of documents to leave out, ascending, counted over all inputs.
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
        self._read = self._dropped = 0
        self._accounts: list[dict[str, Any]] = []

    def make(self, request: str = "") -> list[dict[str, Any]]:
        """Write the pairs, all of them or none.

        Args:
            request: digest of what was asked for, for the manifests; `tokenize` compares it.

        Returns:
            Manifests of the pairs.

        Raises:
            UserError: a file is damaged, a document is bad, or too many are.
            encode.Mismatch: the fast encoder is wrong for this text.
        """
        started = time.monotonic()
        targets = prefixes(self._output, self._options.fields)
        aside = quarantine_path(targets[0])
        names = [path for target in targets for path in pair_files(target)[:-1]]
        names += [aside, *(pair_files(target)[-1] for target in targets)]
        with atomic(*names, optional=[aside], vouching=len(targets)) as temporaries:
            final = dict(zip(names, temporaries, strict=True))
            quarantine = Quarantine(final[aside])
            with ExitStack() as stack:
                stack.callback(quarantine.close)
                outputs = [
                    stack.enter_context(
                        _Output([final[p] for p in pair_files(t)], self._dtype, *self._frame())
                    )
                    for t in targets
                ]
                self._write(outputs, quarantine)
            self._check_fraction(quarantine)
            common = self._manifest(quarantine, request)
            manifests: list[dict[str, Any]] = []
            for output, key in zip(outputs, self._options.fields.names, strict=True):
                manifest = {**common, "text_key": key, **output.counts()}
                assert self._read == self._dropped + quarantine.documents + (
                    manifest["documents"] + manifest["empty_documents"]
                )
                manifest["seconds"] = round(time.monotonic() - started, 3)
                with_aside = [final[aside]] if quarantine.documents and not manifests else []
                manifests.append({**manifest, **output.hashes(*with_aside)})
                write_manifest(output.paths[-1], manifests[-1])
        return manifests

    def _frame(self) -> tuple[int | None, int | None]:
        """Tokens before and after each document."""
        options, tokenizer = self._options, self._tokenizer
        return (
            tokenizer.bos if options.prepend_bos else None,
            tokenizer.eod if options.append_eod else None,
        )

    def _write(self, outputs: "list[_Output]", quarantine: Quarantine) -> None:
        from tokamake.runtime.console import progress

        keep = self._options.empty_documents == "keep"
        with closing(self._encoded(_gather(self._documents(quarantine)))) as done:
            for batch, encoded in progress(
                done,
                label=f"tokenize {self._output.name}",
                unit="documents",
                size=lambda item: len(item[0].inputs),
            ):
                for output, tokens in zip(outputs, encoded, strict=True):
                    output.add(batch, tokens, keep_empty=keep)

    def _documents(self, quarantine: Quarantine) -> Iterator[DocumentBatch]:
        """Good documents of all inputs; bad ones stop the stage or are set aside."""
        fields = self._options.fields
        for index, source in enumerate(self._inputs):
            for block in source.blocks(fields.read_keys):
                texts = documents.texts(block, fields)
                kept = self._without_duplicates(texts.kept)
                for bad, reason in texts.bad:
                    self._bad(source, block, bad, reason, quarantine)
                self._read += len(block.records)
                chosen = texts.kept[kept]
                columns = texts.columns
                if len(chosen) != len(texts.kept):
                    columns = tuple([c[i] for i in kept.nonzero()[0].tolist()] for c in columns)
                yield DocumentBatch(
                    columns,
                    np.full(len(chosen), index, np.int64),
                    block.numbers[chosen],
                    block.offsets[chosen],
                )
            self._accounts.append(_account(source))

    def _without_duplicates(self, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of a block's good documents stay."""
        if not len(self._duplicates):
            return np.ones(len(kept), bool)
        stays = ~np.isin(kept + self._read, self._duplicates, assume_unique=True)
        self._dropped += int(len(kept) - stays.sum())
        return stays

    def _bad(
        self, source: Input, block: RecordBlock, index: int, reason: str, quarantine: Quarantine
    ) -> None:
        if self._options.on_bad_document == "stop":
            place = source.place(int(block.numbers[index]), int(block.offsets[index]))
            raise UserError(f"{place}: {reason}, or set on_bad_document to quarantine")
        quarantine.add(source, block, index, reason)

    def _check_fraction(self, quarantine: Quarantine) -> None:
        bad, limit = quarantine.documents, self._options.max_bad_fraction
        if bad > limit * self._read:
            raise UserError(
                f"{quarantine.first}; {bad:,} of {self._read:,} documents are bad, more than "
                f"max_bad_fraction {limit:g}: mend them or raise it"
            )

    def _encoded(
        self, batches: Iterable[DocumentBatch]
    ) -> Generator[tuple[DocumentBatch, list[Tokens]], None, None]:
        """Encode batches in threads, in order, some ahead of the one that is handed out."""
        waiting: deque[tuple[DocumentBatch, list[Future[Tokens]]]] = deque()
        pool = ThreadPoolExecutor(self._encoder.threads)
        try:
            for batch in batches:
                work = [pool.submit(self._encode, t, self._encoder.place(t)) for t in batch.columns]
                waiting.append((batch, work))
                while len(waiting) > self._encoder.threads:
                    done, work = waiting.popleft()
                    yield done, [tokens.result() for tokens in work]
            while waiting:
                done, work = waiting.popleft()
                yield done, [tokens.result() for tokens in work]
        finally:  # whoever interrupts waits for the batches that are being encoded, and no others
            pool.shutdown(cancel_futures=True)

    def _encode(self, texts: Sequence[str], place: range) -> Tokens:
        """Encode documents, in a thread: nothing here changes the shard."""
        parts, counts = texts, np.ones(len(texts), np.int64)
        if self._options.split_sentences:
            parts, counts = sentences.split(list(texts), self._options.language)
        ids, lengths = self._encoder(parts, place)
        # Sequences without a token are none; documents keep those that have some.
        owner = np.repeat(np.arange(len(texts)), counts)[lengths > 0]
        counts = np.bincount(owner, minlength=len(texts))
        return Tokens(ids, lengths[lengths > 0], counts, _utf8_bytes(texts))

    def _manifest(self, quarantine: Quarantine, request: str) -> dict[str, Any]:
        options = asdict(self._options)
        del options["fields"]
        return {
            "tokamake": __version__,
            "request": request,
            "inputs": self._accounts,
            "tokenizer": self._tokenizer.fingerprint,
            "encoder": self._encoder.name,
            "vocab_size": self._tokenizer.vocab_size,
            "eod": self._tokenizer.eod,
            "bos": self._tokenizer.bos,
            "dtype": self._dtype.__name__,
            "template": self._options.fields.template,
            **options,
            "documents_in": self._read,
            "quarantined_documents": quarantine.documents,
            "duplicate_documents": self._dropped,
        }


def _account(source: Input) -> dict[str, Any]:
    """What was read of a raw file, for the manifest."""
    whole = source.start == 0 and source.end is None
    return {
        "path": str(source.path),
        "format": source.format,
        "compression": source.compression,
        "unit": source.unit,
        "byte_range": None if whole else [source.start, source.end],
        "bytes": source.bytes,
        "sha256": source.sha256,
        "documents": source.documents,
        "blank_lines": source.blank_lines,
    }


class _Output:
    """The writers of one pair.

    Args:
        paths: temporary names of its files.
        dtype: of its tokens.
        bos: token before each document, if any.
        eod: token after each document, if any.
    """

    def __init__(
        self, paths: list[Path], dtype: type[np.integer], bos: int | None, eod: int | None
    ) -> None:
        self.paths = paths
        self._dtype, self._bos, self._eod = dtype, bos, eod
        self._writer = DatasetWriter(paths[0], paths[1], dtype)
        self._sources = SourcesWriter(paths[2])
        self._documents = self._empty = self._text_bytes = 0

    def add(self, batch: DocumentBatch, tokens: Tokens, *, keep_empty: bool) -> None:
        """Append a batch; documents without a sequence only where they are to be kept."""
        full = tokens.counts > 0
        self._documents += int(full.sum())
        self._empty += len(full) - int(full.sum())
        self._text_bytes += tokens.text_bytes
        stays = np.ones(len(full), bool) if keep_empty else full
        self._writer.add(*self._framed(tokens), tokens.counts[stays])
        self._sources.add(batch.inputs[stays], batch.numbers[stays], batch.offsets[stays])

    def _framed(self, tokens: Tokens) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        """Tokens in the pair's dtype, bos and eod among them, and the lengths of sequences."""
        counts = tokens.counts[tokens.counts > 0]
        ends = counts.cumsum()
        lengths = tokens.lengths.copy()
        sums = np.add.reduceat(lengths, ends - counts) if len(counts) else lengths
        lengths[ends - 1] += self._eod is not None
        lengths[ends - counts] += self._bos is not None
        bos, eod = (-1 if token is None else token for token in (self._bos, self._eod))
        return pack(tokens.ids, sums, bos=bos, eod=eod, dtype=self._dtype), lengths

    def counts(self) -> dict[str, int]:
        """What has been written, as the manifest states it."""
        index = self._writer.index
        return {
            "documents": self._documents,
            "empty_documents": self._empty,
            "sequences": index.sequences,
            "tokens": index.tokens,
            "text_bytes": self._text_bytes,
        }

    def hashes(self, *more: Path) -> dict[str, Any]:
        """Sizes and hashes of the files."""
        known = self._writer.sha256.hexdigest()
        return sizes_and_hashes(*self.paths[:-1], *more, bin_sha256=known)

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *error: Any) -> None:
        self._sources.__exit__(*error)
        self._writer.__exit__(*error)


def _gather(batches: Iterable[DocumentBatch]) -> Iterator[DocumentBatch]:
    """Put small batches together, so that many small files cost no more than a large one."""
    waiting: list[DocumentBatch] = []
    characters = 0
    for batch in batches:
        waiting.append(batch)
        characters += sum(map(extent, batch.columns))
        characters += _DOCUMENT_CHARACTERS * len(batch.inputs)
        if characters >= _BATCH_CHARACTERS:
            yield _join(waiting)
            waiting, characters = [], 0
    if waiting:
        yield _join(waiting)


def _join(batches: list[DocumentBatch]) -> DocumentBatch:
    if len(batches) == 1:
        return batches[0]
    columns = zip(*(batch.columns for batch in batches), strict=True)
    return DocumentBatch(
        tuple(map(_chained, columns)),
        *(np.concatenate([batch[field] for batch in batches]) for field in (1, 2, 3)),
    )


def _chained(parts: tuple[Sequence[str], ...]) -> Sequence[str]:
    utf8 = [part for part in parts if isinstance(part, Utf8)]
    if len(utf8) == len(parts):
        return Utf8.joined(utf8)
    return [text for part in parts for text in part]


def _utf8_bytes(texts: Sequence[str]) -> int:
    if isinstance(texts, Utf8):
        return texts.data.size
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
