"""Stage `tokenize`: raw files become .bin/.idx pairs, one sequence a document or a sentence.

By itself it makes one shard of the files it is given; in the workflow it makes the shards of one
batch of the plan, those that are not whole yet. `maker` runs both, `shard` has the data's way.
"""

import os
from pathlib import Path
from typing import Literal

from tokamake.errors import UserError


def tokenize(
    files: tuple[str, ...] = (),
    /,
    *,
    output: Path,
    tokenizer: Path,
    text_key: tuple[str, ...] = (),
    template: str = "",
    format: str = "",
    append_eod: bool = True,
    prepend_bos: bool = False,
    split_sentences: bool = False,
    language: str = "en",
    empty_documents: Literal["skip", "keep"] = "skip",
    on_bad_document: Literal["stop", "quarantine"] = "stop",
    max_bad_fraction: float = 1.0,
    byte_range: str = "",
    corpora: Path | None = None,
    plan: Path | None = None,
    batch: str = "",
    summary: Path | None = None,
    duplicates: Path | None = None,
    workers: int = 0,
) -> None:
    """Tokenize raw files into a Megatron .bin/.idx pair with a manifest.

    Every document is in the pair or counted: documents in = out + empty + quarantined (+
    duplicates, in the workflow). Nothing is written where a file is damaged.

    Args:
        files: jsonl, parquet, Arrow (as `datasets` saves) or plain text files, compressed or not;
            folders of them, patterns; or one corpus by its name in the table of corpora given.
        output: prefix of the pair: PREFIX.bin, .idx, .sources and .json (the manifest) are written;
            with several keys PREFIX_KEY.* each. With a plan, the folder of shards.
        tokenizer: folder or file of a tokenizer: tokenizer.json, vocab.json with merges.txt,
            SentencePiece .model, or vocab.txt.
        text_key: key or column that holds the text ("text" if not told); several, each given
            with this option or all with commas, become a pair each.
        template: text of a document, from several keys: "{title}\\n\\n{text}".
        format: format of the files, where it cannot be told from them.
        append_eod: end each document with the tokenizer's end-of-document token.
        prepend_bos: begin each document with the tokenizer's beginning-of-sequence token.
        split_sentences: make each sentence a sequence of its own.
        language: language of the text (ISO 639), for its sentences.
        empty_documents: documents without a token: left out, or kept as Megatron-LM keeps them.
        on_bad_document: stop at a document that cannot be read, or write it to
            PREFIX.quarantine.jsonl with the reason and go on.
        max_bad_fraction: largest share of documents that may be quarantined.
        byte_range: START:END in bytes of a single plain jsonl or parquet file; END may be empty.
        corpora: table of corpora, as config/corpora.tsv.
        plan: plan.json of the workflow, instead of files.
        batch: name of a batch in the plan, whose shards are made.
        summary: JSON file to write when all shards of the batch are whole.
        duplicates: documents of the plan's shards to leave out, as `find-duplicates` writes them.
        workers: threads, 0 for all cores; the output does not depend on it.

    Raises:
        UserError: a file is missing or damaged, a document is bad, or there is no such tokenizer.
    """
    if bool(files) == (plan is not None) or (plan is not None and summary is None):
        raise UserError("give FILES, or --plan with --batch and --summary")
    if workers < 0 or not output.name:
        raise UserError(f"--workers {workers}, --output {output}: give a number and a file name")
    workers = workers or len(os.sched_getaffinity(0))
    from tokamake.data import readers
    from tokamake.data.corpus.documents import Fields, keys_of
    from tokamake.data.tokenize.batch import BatchTokenizer, ShardRequest
    from tokamake.data.tokenize.shard import ShardOptions
    from tokamake.data.tokenizers import open_tokenizer

    if corpora is not None:
        # pydantic takes a quarter of a second to import, and few name a table.
        from tokamake.data.corpus import corpora as tables
        from tokamake.data.corpus.raw_files import raw_files

        row = tables.named(files, corpora)
        files, format = tuple(file.path for file in raw_files(row, {})), format or row.format
        text_key, template = text_key or (row.text_key,), template or row.template
    keys = keys_of(text_key)
    if len(keys) > 1 and not template and any("/" in key for key in keys):
        raise UserError(f"--text-key {','.join(keys)}: keys name files, which have no / in a name")
    options = ShardOptions(
        fields=Fields(keys, template).checked(),
        format=format,
        append_eod=append_eod,
        prepend_bos=prepend_bos,
        split_sentences=split_sentences,
        language=language,
        empty_documents=empty_documents,
        on_bad_document=on_bad_document,
        max_bad_fraction=max_bad_fraction,
    )
    maker = BatchTokenizer(open_tokenizer(tokenizer), options, workers)
    if plan is None or summary is None:
        maker.make(ShardRequest(output, readers.expand(files), byte_range))
    else:
        maker.make_batch(plan, batch, output, summary=summary, duplicates=duplicates)
