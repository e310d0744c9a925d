"""Tool `tokenize`: read raw files, encode their documents, write an indexed dataset.

The workflow uses `tokenize-batch`. `shard` has the path of the data.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokamake import plugins
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.filters import Filters


def tokenize(
    files: tuple[str, ...],
    /,
    *,
    output: Path,
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
    byte_range: str = "",
    megatron_names: bool = False,
    corpora: Path | None = None,
    workers: int = 0,
    explain: bool = False,
) -> None:
    """Tokenize raw files into a Megatron indexed dataset (.bin and .idx) with a manifest.

    It accounts for every document: documents in = documents out + empty + quarantined +
    filtered. It writes nothing if a file is damaged.

    Args:
        files: files of any `format`, compressed or not; folders of them; glob patterns; or the
            name of one corpus in the table of corpora.
        output: prefix of the indexed dataset: PREFIX.bin, PREFIX.idx, PREFIX.sources and
            PREFIX.json (the manifest). Several keys give one dataset each, PREFIX_KEY.
        tokenizer: folder or file of a tokenizer: tokenizer.json, vocab.json with merges.txt,
            SentencePiece .model, or vocab.txt.
        text_key: key or column that holds the text (default "text"); `meta.text` is the key `text`
            in the object `meta`, unless a key has this name. Repeat the option or separate
            keys with commas to write one dataset per key.
        template: text of a document as a combination of keys: "{title}\\n\\n{text}".
        format: format of the files: FORMATS; empty: detected for each file.
        append_eod: end each document with the tokenizer's end-of-document token.
        prepend_bos: begin each document with the tokenizer's beginning-of-sequence token.
        special_tokens_in_text: special: a special token's name in a text, such as <|endoftext|>,
            becomes that token. plain: it stays ordinary text, as with split_special_tokens in
            transformers.
        split_sentences: make each sentence a sequence.
        language: language of the text (ISO 639 code), for the sentence boundaries.
        empty_documents: skip documents without tokens, or keep them as Megatron-LM does.
        on_bad_document: stop at a document that cannot be read or on which a filter fails, or
            write it to PREFIX.quarantine.jsonl with the reason and continue.
        max_bad_fraction: largest fraction of all documents, and of each file, that may be
            quarantined. A file without good documents is always an error.
        filters: filters of the documents, in order, as in the table of corpora: `length:
            {min_characters: 200}, regex: {drop: lorem ipsum}`.
        filter_seconds: time limit of the filters of a document, in seconds; a document that takes
            longer is a bad one. 0: no limit.
        byte_range: START:END in bytes of a single uncompressed jsonl or parquet file, or of a dump
            of Wikipedia; END may be empty.
        megatron_names: name the datasets as Megatron's preprocess_data.py does:
            PREFIX_KEY_document, or PREFIX_KEY_sentence with `split_sentences`.
        corpora: table of corpora, such as config/corpora.tsv.
        workers: number of threads; 0 uses all cores. The output does not depend on it.
        explain: also print which encoder was used, how fast it was, and why it was not the fast
            one.
    """
    if not files:
        raise UserError("no FILES given; name files, folders or patterns")
    if not output.name:
        raise UserError(f"--output {output}: give a path that ends in a name")
    if output.is_dir():
        raise UserError(f"--output {output}: is a folder; give a prefix, such as {output}/NAME")
    # These modules import numpy or pydantic, and `tokamake tokenize --help` should be instant.
    from tokamake.data import readers
    from tokamake.data.corpus.documents import Fields, split_keys
    from tokamake.data.tokenize.shard_options import ShardOptions, ShardRequest
    from tokamake.data.tokenize.shard_tokenizer import ShardTokenizer
    from tokamake.data.tokenizers import open_tokenizer

    chosen: Filters = ()
    if filters:
        from tokamake.config.filters import parse_filters  # imports pydantic: 0.25 s

        chosen = parse_filters(filters)
    if corpora is not None:
        # Imported only here: pydantic takes 0.25 s to import, and few calls name a table.
        from tokamake.data.corpus.corpora import find_corpus
        from tokamake.data.corpus.raw_files import raw_files

        row = find_corpus(files, corpora)
        files, format = tuple(file.path for file in raw_files(row, {})), format or row.format
        text_key, template = text_key or (row.text_key,), template or row.template
        chosen = chosen or row.filters or ()
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
        filters=tuple(chosen),
        filter_seconds=filter_seconds,
        megatron_names=megatron_names,
    )
    shard_tokenizer = ShardTokenizer(open_tokenizer(tokenizer), options, workers=workers)
    request = ShardRequest(output, readers.expand(files), byte_range)
    shard_tokenizer.write(request, explain=explain)


tokenize.__doc__ = (tokenize.__doc__ or "").replace(
    "FORMATS", ", ".join(plugins.names("data/readers"))
)
