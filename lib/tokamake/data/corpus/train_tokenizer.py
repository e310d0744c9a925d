"""Stage `train_tokenizer`: raw corpora to a tokenizer in a Hugging Face folder.

Raw files, named or listed in a plan, are read by `readers`; `_training` has the kinds.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.data.corpus import corpora as tables
from tokamake.data.corpus.documents import Fields, read_texts, split_keys, texts
from tokamake.data.readers import expand, open_input
from tokamake.data.tokenizers._trainers import MINIMUM, check_special_tokens, train, write
from tokamake.errors import UserError
from tokamake.runtime.console import counted


class _Raw(NamedTuple):
    path: Path
    fields: Fields
    format: str


def train_tokenizer(
    files: tuple[str, ...] = (),
    /,
    *,
    plan: Path | None = None,
    corpora: Path | None = None,
    text_key: tuple[str, ...] = (),
    template: str = "",
    format: str = "",
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe",
    vocab_size: int = 8192,
    special_tokens: tuple[str, ...] = (),
    train_bytes: int = 1_000_000_000,
    on_bad_document: Literal["stop", "quarantine"] = "stop",
    output: Path,
) -> None:
    """Train a tokenizer on raw files.

    Args:
        files: files, folders or patterns, of any format and compression that `tokenize` reads; or
            one corpus by its name in the table of corpora given.
        plan: a plan that lists the files instead, and how to read them.
        corpora: table of corpora, as config/corpora.tsv.
        text_key: key or column that holds the text ("text" if not told); several are all learned
            from.
        template: joins several keys to one text, as in {title}\\n\\n{text}.
        format: format of the files: jsonl, parquet, arrow or text; empty: told from each file.
        kind: bpe: byte-level BPE as GPT-2's, without loss; wordpiece: BERT's, lower-cased;
            unigram: Unigram over bytes, without loss.
        vocab_size: entries of the tokenizer, special tokens included.
        special_tokens: special tokens besides those of the kind, as <fim_prefix>; each gets an
            entry, and in text it is that one token.
        train_bytes: text to train on, at most, taken evenly from the beginnings of all files.
        on_bad_document: stop at a document that cannot be read, or leave it out (quarantine);
            `tokenize` reports it.
        output: folder for tokenizer.json and tokenizer_config.json.

    Raises:
        UserError: a raw file is missing or damaged, a document is bad, the text is too little for
            `vocab_size`, or a special token is none.
    """
    check_special_tokens(kind, special_tokens)
    least = MINIMUM[kind] + len(special_tokens)
    if vocab_size < least:
        raise UserError(
            f"--vocab-size: {vocab_size}: too small for kind {kind}, give at least {least}"
        )
    if corpora is not None:
        row = tables.find_corpus(files, corpora)
        files, format = tables.patterns(row), format or row.format
        text_key, template = text_key or (row.text_key,), template or row.template
    keys = split_keys(text_key)
    sources = _planned(plan, files) if plan else _named(files, Fields(keys, template), format)
    share = train_bytes // len(sources)

    def beginnings() -> Iterator[str]:
        return chain.from_iterable(
            _beginning(_read(raw, on_bad_document), share) for raw in sources
        )

    trained = train(kind, beginnings, vocab_size, special_tokens=special_tokens)
    write(kind, trained, output, special_tokens=special_tokens)
    print(f"{output}: {kind}, {vocab_size:,} entries from {counted(len(sources), 'file')}")


def _planned(path: Path, files: tuple[str, ...]) -> list[_Raw]:
    from tokamake.data.corpus.plan_file import read_plan

    if files:
        raise UserError(f"--plan {path}: lists the files itself; give it or files")
    found = [
        _Raw(Path(file), Fields(split_keys([source.text_key]), source.template), source.format)
        for source in read_plan(path).tokenizer
        for file in source.files
    ]
    if not found:
        raise UserError(f"--plan {path}: lists no files to train on; make the plan again")
    return found


def _named(files: tuple[str, ...], fields: Fields, format: str) -> list[_Raw]:
    if not files:
        raise UserError("no raw files to train on; name some, or a plan with --plan")
    return [_Raw(path, fields, format) for path in expand(files)]


def _read(raw: _Raw, on_bad_document: str) -> Iterator[str]:
    path, fields, format = raw
    if on_bad_document == "stop":
        key = ",".join(fields.keys)
        yield from read_texts(path, key, template=fields.template, format=format)
        return
    for block in open_input(path, format=format).blocks(fields.read_keys):
        for document in zip(*texts(block, fields).columns, strict=True):
            yield from document


def _beginning(texts: Iterator[str], share: int) -> Iterator[str]:
    for text in texts:
        yield text
        share -= len(text.encode("utf-8", "surrogatepass"))
        if share <= 0:
            return
