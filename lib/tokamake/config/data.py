"""Settings of the data stages: sample corpus, tokenizer, plan, tokenization."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tokamake.config.fields import Matching, Settings, TokenizerPath, plug_in
from tokamake.config.filters import Filters
from tokamake.config.near_duplicates import NearDuplicates
from tokamake.config.repeats import Repeats


class SampleCorpus(Settings):
    """A corpus that `sample_corpus` extracts from the Python standard library."""

    num_files: Annotated[int, Field(ge=1)] = 4
    """Number of jsonl files. The last one is compressed with gzip."""
    file_bytes: Annotated[int, Field(ge=1000)] = 1_000_000
    """Maximum size of a file, in bytes of uncompressed jsonl. `plan` uses it as the size of each
    file."""


MIN_VOCAB_SIZE = 300


class TokenizerSettings(Settings):
    """The tokenizer: an existing one, or one to train on the corpora."""

    path: TokenizerPath | None = None
    """File or folder of an existing tokenizer: tokenizer.json, GPT-2 vocab.json + merges.txt,
    SentencePiece .model, or BERT vocab.txt; or an address of the Hugging Face Hub,
    hf://ORG/NAME@REVISION, or the https address of such a file. Empty: train a tokenizer on the
    corpora."""
    kind: Annotated[str, plug_in("data/tokenizers/trained")] = "bpe"
    """Kind of tokenizer to train if `path` is empty: bpe, byte-level BPE as in GPT-2; wordpiece, as
    in BERT; or unigram, over bytes. ids: nothing is trained, and text is token ids separated by
    spaces, for existing indexed datasets whose tokenizer is not at hand."""
    vocab_size: Annotated[int, Field(ge=2)] = 8192
    """Vocabulary size of the tokenizer to train if `path` is empty, or of the kind ids."""
    eod: Annotated[int, Field(ge=0)] | None = None
    """End-of-document token of the kind ids. Empty: the last of the vocabulary."""
    special_tokens: tuple[str, ...] = ()
    """Additional special tokens of the trained tokenizer, for example for fill-in-the-middle."""
    sentinels: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Sentinels, <extra_id_0> and so on, to append to a WordPiece tokenizer together with [BOS] and
    [EOS]: objective span_corruption needs them. T5 has 100. Data are tokenized without them, and
    all other tokens keep their ids. 0: append nothing."""
    train_bytes: Annotated[int, Field(ge=1)] = 1_000_000_000
    """Maximum bytes of text to train on, sampled evenly from all raw files."""

    @property
    def has_ids(self) -> bool:
        return self.path is None and self.kind == "ids"

    @model_validator(mode="after")
    def _check_kind(self) -> "TokenizerSettings":
        if self.kind != "ids":
            if self.vocab_size < MIN_VOCAB_SIZE:
                raise ValueError(
                    f"vocab_size: {self.vocab_size}: give at least {MIN_VOCAB_SIZE} for kind "
                    f"{self.kind}"
                )
            if self.eod is not None:
                raise ValueError(f"eod: {self.eod}: no effect on kind {self.kind}; remove it")
            return self
        if "vocab_size" not in self.model_fields_set:
            raise ValueError("vocab_size: missing; kind ids needs the number of token ids")
        if self.sentinels:
            raise ValueError(f"sentinels: {self.sentinels}: no effect on kind ids; remove it")
        if self.special_tokens:
            raise ValueError("special_tokens: no effect on kind ids; remove them")
        if self.eod is not None and self.eod >= self.vocab_size:
            raise ValueError(
                f"eod: {self.eod}: not in the vocabulary of {self.vocab_size:,} entries; give a "
                "token below vocab_size"
            )
        return self


class PlanSettings(Settings):
    """Sizes of shards, merged datasets and job batches."""

    shard_bytes: Annotated[int, Field(ge=1)] = 1_000_000_000
    """Approximate raw bytes per shard. Small files share a shard. A large parquet or uncompressed
    jsonl file is split at row groups or line ends, and a multistream dump of Wikipedia at its
    streams."""
    max_jobs: Annotated[int, Field(ge=1)] = 500
    """Approximate maximum number of `tokenize` jobs. A plan with more shards puts several shards in
    one job. With more corpora than jobs, corpora of the same format and text keys share jobs,
    unless `tokenize.deduplicate`, `tokenize.near_duplicates` or `tokenize.repeats` is set."""
    merged_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    """Approximate bytes of the .bin file of a merged dataset."""
    keep_shards: bool = True
    """Keep shards after they are merged. false: delete the shards of a merged dataset once its
    files are verified, which saves half of the disk that tokens take. A merged dataset that is lost
    later needs its raw files again."""
    token_bytes_per_text_byte: Annotated[float, Field(gt=0)] = 0.5
    """Estimated .bin bytes per byte of uncompressed jsonl. About 0.5 for vocabularies below 65,500
    entries (2 bytes per token, 4 bytes of text per token), 1.0 for larger ones."""


class TokenizeSettings(Settings):
    """Conversion of documents to sequences of tokens."""

    append_eod: bool = True
    """Append the tokenizer's end-of-document token to each document."""
    prepend_bos: bool = False
    """Prepend the tokenizer's beginning-of-sequence token to each document."""
    special_tokens_in_text: Literal["special", "plain"] = "special"
    """Text that is the name of a special token, such as <|endoftext|>. special: it becomes that
    token. plain: it stays ordinary text, as with `split_special_tokens` in transformers."""
    split_sentences: bool = False
    """Write each sentence as a separate sequence, for BERT, T5 and ICT data."""
    language: Annotated[
        str, Matching(r"^[a-z]{2,3}$", "a code of two or three lowercase letters, such as en")
    ] = "en"
    """ISO 639 code of the language of the text, for `split_sentences`."""
    empty_documents: Literal["skip", "keep"] = "skip"
    """Documents without tokens. skip: drop them. keep: write documents without a sequence, as
    Megatron-LM does. The manifest counts them in both cases."""
    on_bad_document: Literal["stop", "quarantine"] = "stop"
    """Action on a document that cannot be read, or on which a filter fails. stop: fail the job.
    quarantine: write it to <shard>.quarantine.jsonl with the reason and continue."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Maximum share of documents in quarantine, of a shard and of each of its raw files. The job
    fails above it. A raw file without good documents fails it in any case."""
    deduplicate: bool | Literal["data"] = False
    """Drop documents whose text already occurred. true: in the same corpus. data: in the same
    corpus or in one above it in the table of corpora."""
    near_duplicates: NearDuplicates | None = None
    """Drop documents that are nearly the same as an earlier one, after the filters: a preset, such
    as fineweb, or settings. null: keep them."""
    repeats: Repeats | None = None
    """Cut text out of documents that repeats earlier text, after the filters and without
    duplicates: lines, paragraphs or words, or settings. null: keep it."""
    filters: Filters = ()
    """Filters of documents, in order: name of a filter and its options, such as length:
    {min_characters: 200}. A filter is built in (docs/howto/filter-documents.md), an entry point, or
    the path of a Python file. A corpus with filters of its own has these instead."""
    filter_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60
    """Time limit of the filters of a document, in seconds. A document that takes longer, such as in
    an endless search of a regular expression, is a bad document. 0: no limit."""

    @property
    def compares_documents(self) -> bool:
        """Whether documents of a corpus are compared with each other."""
        return any((self.deduplicate, self.near_duplicates, self.repeats))
