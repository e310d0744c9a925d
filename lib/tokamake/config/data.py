"""Settings of the data's way: tokenizer, plan, tokenization, the sample corpus."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tokamake.config.fields import Settings


class SampleCorpus(Settings):
    """One corpus that `sample_corpus` harvests from the Python standard library."""

    num_files: Annotated[int, Field(ge=1)] = 4
    """Number of jsonl files; the last one is gzipped."""
    file_bytes: Annotated[int, Field(ge=1000)] = 1_000_000
    """Largest size of one file, in bytes of uncompressed jsonl; `plan` counts with it."""


class TokenizerSettings(Settings):
    """Which tokenizer turns text into tokens."""

    path: Path | None = None
    """Folder or file of a tokenizer: tokenizer.json, GPT-2 vocab.json + merges.txt,
    SentencePiece .model, or BERT vocab.txt. Empty: train one on the corpora."""
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    """What is trained when `path` is empty: byte-level BPE as GPT-2's, BERT's WordPiece, or
    Unigram over bytes."""
    vocab_size: Annotated[int, Field(ge=300)] = 8192
    """Entries of the tokenizer that is trained when `path` is empty."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens it has besides those of its kind, as fill-in-the-middle needs."""
    train_bytes: Annotated[int, Field(ge=1)] = 1_000_000_000
    """Text it is trained on, at most, taken evenly from all raw files."""


class PlanSettings(Settings):
    """How raw files are cut into shards and shards gathered into merged files."""

    shard_bytes: Annotated[int, Field(ge=1)] = 1_000_000_000
    """Raw bytes of a shard, about: small files share a shard, a larger plain jsonl or parquet file
    is cut at line ends or row groups."""
    max_jobs: Annotated[int, Field(ge=1)] = 500
    """Most `tokenize` jobs of a plan, about: beyond it, several shards are made by one job."""
    merged_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    """Size of one merged .bin file, about."""
    token_bytes_per_text_byte: Annotated[float, Field(gt=0)] = 0.5
    """Estimate of .bin bytes per byte of uncompressed jsonl: about 0.5 for vocabularies below
    65,500 entries (2 bytes a token, 4 bytes of text a token), 1.0 above."""


class TokenizeSettings(Settings):
    """How documents become sequences of tokens."""

    append_eod: bool = True
    """End each document with the tokenizer's end-of-document token."""
    prepend_bos: bool = False
    """Begin each document with the tokenizer's beginning-of-sequence token."""
    split_sentences: bool = False
    """Make each sentence a sequence of its own, as BERT, T5 and ICT data want."""
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] = "en"
    """Language of the text, as an ISO 639 code, for `split_sentences`."""
    empty_documents: Literal["skip", "keep"] = "skip"
    """Documents without a token: left out, or kept as documents without a sequence, as Megatron-LM
    does; counted either way."""
    on_bad_document: Literal["stop", "quarantine"] = "stop"
    """A document that cannot be read stops the stage or goes to <shard>.quarantine.jsonl."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of a shard's documents that may be quarantined."""
    deduplicate: bool = False
    """Leave out documents whose text has come before in the same corpus."""
