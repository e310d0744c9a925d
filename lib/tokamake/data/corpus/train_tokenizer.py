"""Stage `train_tokenizer`: train a tokenizer on raw files and write a Hugging Face folder."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake import plugins
from tokamake.data.corpus.corpora import find_corpus, patterns
from tokamake.data.corpus.documents import Fields, read_texts, split_keys, texts
from tokamake.data.corpus.plan_file import read_plan
from tokamake.data.readers import expand, open_input
from tokamake.data.tokenizers.trained import check_special_tokens, ids, minimum, train, write
from tokamake.errors import UserError
from tokamake.runtime.console import counted


class _TextFile(NamedTuple):
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
    kind: str = "bpe",
    vocab_size: int = 8192,
    eod: int | None = None,
    special_tokens: tuple[str, ...] = (),
    train_bytes: int = 1_000_000_000,
    on_bad_document: Literal["stop", "quarantine"] = "stop",
    output: Path,
) -> None:
    """Train a tokenizer on raw files.

    Args:
        files: files, folders or glob patterns of any format and compression that `tokenize` reads;
            or the name of one corpus in the table of corpora.
        plan: plan that lists the files and how to read them, instead of files.
        corpora: table of corpora, such as config/corpora.tsv.
        text_key: key or column that holds the text (default "text"); the tokenizer learns from the
            texts of several keys.
        template: joins several keys to one text: {title}\\n\\n{text}.
        format: format of the files: FORMATS; empty: detected for each file.
        kind: bpe: byte-level BPE as in GPT-2, lossless; wordpiece: WordPiece as in BERT,
            lower-cased; unigram: Unigram over bytes, lossless; ids: nothing is trained, no file is
            needed, and text is token ids separated by spaces.
        vocab_size: number of entries, special tokens included.
        eod: end-of-document token of the kind ids; by default the last.
        special_tokens: special tokens besides the kind's own, such as <fim_prefix>. Each
            gets an entry, and is one token in text.
        train_bytes: maximum size of the training text, taken evenly from the beginnings of all
            files.
        on_bad_document: stop at a document that cannot be read, or skip it (quarantine);
            `tokenize` reports it.
        output: folder for tokenizer.json and tokenizer_config.json.
    """
    check_special_tokens(kind, special_tokens)
    min_vocab_size = minimum(kind) + len(special_tokens)
    if vocab_size < min_vocab_size:
        raise UserError(
            f"--vocab-size: {vocab_size}: too small for kind {kind}, give at least {min_vocab_size}"
        )
    if kind == "ids":
        _write_ids(vocab_size, eod, output=output)
        return
    if corpora is not None:
        row = find_corpus(files, corpora)
        files, format = patterns(row), format or row.format
        text_key, template = text_key or (row.text_key,), template or row.template
    keys = split_keys(text_key)
    if plan:
        text_files = _files_of_plan(plan, files)
    else:
        text_files = _files_by_name(files, Fields(keys, template), format=format)
    bytes_per_file = train_bytes // len(text_files)

    def training_texts() -> Iterator[str]:  # a function, because some kinds read the texts twice
        return chain.from_iterable(
            _take_bytes(_read(text_file, on_bad_document), bytes_per_file)
            for text_file in text_files
        )

    names, more = [str(text_file.path) for text_file in text_files[:3]], len(text_files) - 3
    source = ", ".join(names) + (f" and {counted(more, 'more file')}" if more > 0 else "")
    trained = train(
        kind, training_texts, vocab_size=vocab_size, special_tokens=special_tokens, source=source
    )
    write(kind, trained, output=output, special_tokens=special_tokens)
    print(f"{output}: {kind}, {vocab_size:,} entries from {counted(len(text_files), 'file')}")


train_tokenizer.__doc__ = (train_tokenizer.__doc__ or "").replace(
    "FORMATS", ", ".join(plugins.names("data/readers"))
)


def _write_ids(vocab_size: int, eod: int | None, *, output: Path) -> None:
    eod = vocab_size - 1 if eod is None else eod
    if not 0 <= eod < vocab_size:
        raise UserError(f"--eod: {eod}: give a token from 0 to {vocab_size - 1}")
    write("ids", ids.make(vocab_size, eod), output=output, eod=eod)
    print(f"{output}: {vocab_size:,} token ids, {eod} ends documents")


def _files_of_plan(path: Path, files: tuple[str, ...]) -> list[_TextFile]:
    if files:
        raise UserError(f"--plan {path}: lists the files itself; give either the plan or files")
    text_files = [
        _TextFile(Path(file), Fields(split_keys([source.text_key]), source.template), source.format)
        for source in read_plan(path).tokenizer
        for file in source.files
    ]
    if not text_files:
        raise UserError(f"--plan {path}: lists no files to train on; rerun `tokamake plan`")
    return text_files


def _files_by_name(files: tuple[str, ...], fields: Fields, *, format: str) -> list[_TextFile]:
    if not files:
        raise UserError("no raw files to train on; name some, or a plan with --plan")
    return [_TextFile(path, fields, format) for path in expand(files)]


def _read(text_file: _TextFile, on_bad_document: str) -> Iterator[str]:
    path, fields, format = text_file
    if on_bad_document == "stop":
        key = ",".join(fields.keys)
        yield from read_texts(path, key, template=fields.template, format=format)
        return
    for block in open_input(path, format=format).blocks(fields.read_keys):
        for document in zip(*texts(block, fields).columns, strict=True):
            yield from document


def _take_bytes(texts: Iterator[str], num_bytes: int) -> Iterator[str]:
    """Yield texts until they have `num_bytes` of UTF-8; the last text is whole."""
    for text in texts:
        yield text
        num_bytes -= len(text.encode("utf-8", "surrogatepass"))
        if num_bytes <= 0:
            return
