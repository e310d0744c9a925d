"""Stage `tokenize-batch`: tokenize the shards of a job batch of the plan."""

from pathlib import Path
from typing import Literal


def tokenize_batch(
    *,
    plan: Path,
    batch: str,
    output: Path,
    summary: Path,
    tokenizer: Path,
    text_key: tuple[str, ...] = (),
    template: str = "",
    format: str = "",
    append_eod: bool = True,
    prepend_bos: bool = False,
    special_tokens_in_text: Literal["special", "plain"] = "special",
    split_sentences: bool = False,
    language: str = "en",
    empty_documents: Literal["skip", "keep"] = "skip",
    on_bad_document: Literal["stop", "quarantine"] = "stop",
    max_bad_fraction: float = 0.01,
    filters: str = "",
    filter_seconds: float = 60,
    duplicates: tuple[Path, ...] = (),
    repeats: Path | None = None,
    workers: int = 0,
) -> None:
    """Tokenize a job batch of a plan: write its incomplete shards.

    The stage accounts for every document of a shard: documents in = documents out + empty +
    quarantined + duplicates + filtered. It writes no shard of a damaged file.

    Args:
        plan: plan.json of the workflow.
        batch: name of a batch of tokenization in the plan.
        output: folder of shards.
        summary: JSON file to write after all shards of the batch are complete.
        tokenizer: folder or file of a tokenizer, as for `tokenize`.
        text_key: key or column that holds the text (default "text"); several give one dataset each.
        template: text of a document as a combination of keys: "{title}\\n\\n{text}".
        format: format of the files, if it cannot be detected.
        append_eod: end each document with the tokenizer's end-of-document token.
        prepend_bos: begin each document with the tokenizer's beginning-of-sequence token.
        special_tokens_in_text: special: a special token's name in a text, such as <|endoftext|>,
            becomes that token. plain: it stays ordinary text, as with split_special_tokens in
            transformers.
        split_sentences: make each sentence a sequence.
        language: language of the text (ISO 639 code), for the sentence boundaries.
        empty_documents: skip documents without tokens, or keep them as Megatron-LM does.
        on_bad_document: stop at a document that cannot be read or on which a filter fails, or
            write it to SHARD.quarantine.jsonl with the reason and continue.
        max_bad_fraction: largest fraction of a shard's documents, and of each file's, that
            may be quarantined.
        filters: filters of the documents, in order, as in the table of corpora: `length:
            {min_characters: 200}, regex: {drop: lorem ipsum}`.
        filter_seconds: time limit of the filters of a document, in seconds; a document that takes
            longer is a bad one. 0: no limit.
        duplicates: files of `find-duplicates` or `find-near-duplicates`: documents to leave out.
        repeats: file of `find-repeats`: text to cut out of documents, after the filters.
        workers: number of threads; 0 uses all cores. The output does not depend on it.
    """
    # These modules import numpy or pydantic, and `--help` should be instant.
    from tokamake.config.filters import parse_filters
    from tokamake.data.corpus.document_rows import (
        has_near_duplicates,
        read_duplicates,
        read_near_duplicates,
        read_table,
    )
    from tokamake.data.corpus.documents import Fields, split_keys
    from tokamake.data.corpus.passages import read_cuts
    from tokamake.data.corpus.plan_file import batch_shards
    from tokamake.data.indexed import job_batch
    from tokamake.data.tokenize.shard_options import ShardOptions, ShardRequest, dataset_prefixes
    from tokamake.data.tokenize.shard_tokenizer import ShardTokenizer
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.runtime.folder_lock import alone

    options = ShardOptions(
        fields=Fields(split_keys(text_key), template).checked(),
        format=format,
        append_eod=append_eod,
        prepend_bos=prepend_bos,
        special_tokens_in_text=special_tokens_in_text,
        split_sentences=split_sentences,
        language=language,
        empty_documents=empty_documents,
        on_bad_document=on_bad_document,
        max_bad_fraction=max_bad_fraction,
        filters=parse_filters(filters),
        filter_seconds=filter_seconds,
    )
    for path in (*duplicates, *([repeats] if repeats else [])):
        read_table(path, verify=True)
    near = [path for path in duplicates if has_near_duplicates(path)]
    equal = [path for path in duplicates if path not in near]
    shards = [
        ShardRequest(
            output / shard.name,
            [Path(path) for path in shard.files],
            shard.byte_range,
            read_duplicates(duplicates, shard.name) if duplicates else None,
            read_near_duplicates(near, equal, shard=shard.name) if near else None,
            shard.stamps,
            read_cuts(repeats, shard.name) if repeats else None,
        )
        for shard in batch_shards(plan, batch)
    ]
    shard_tokenizer = ShardTokenizer(open_tokenizer(tokenizer), options, workers=workers)
    prefixes = [prefix for shard in shards for prefix in dataset_prefixes(shard.output, options)]
    with alone(summary):
        job_batch.make_each(shards, shard_tokenizer.write_if_needed)
        job_batch.write_batch(summary, batch, folder=output, prefixes=prefixes)
