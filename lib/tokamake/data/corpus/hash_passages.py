"""Stage `hash_passages`: hash the lines, paragraphs or sequences of words of a job batch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.batch_rows import write_batch_rows
from tokamake.data.corpus.documents import Fields, split_keys
from tokamake.data.corpus.filtered_documents import DocumentSource, FilteredBlock
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from tokamake.data.corpus.passages import Passages


def hash_passages(
    *,
    plan: Path,
    batch: str,
    output: Path,
    text_key: tuple[str, ...] = ("text",),
    template: str = "",
    format: str = "",
    filters: str = "",
    filter_seconds: float = 60,
    on_bad_document: Literal["stop", "quarantine"] = "stop",
    duplicates: tuple[Path, ...] = (),
    unit: Literal["lines", "paragraphs", "words"] = "lines",
    min_characters: int = 50,
    min_words: int = 50,
    edge_words: int = 8,
) -> None:
    """Hash the passages of each document of a job batch, to find text that repeats.

    The documents are the ones that `tokenize` writes: duplicates are left out, and filters run
    first. Bad documents have no passages.

    Args:
        plan: plan.json of the workflow.
        batch: name of a `tokenize` batch in the plan.
        output: file of passages to write.
        text_key: key or column that holds the text; several keys have passages of their own.
        template: text of a document as a combination of keys.
        format: format of the files, if the stage cannot detect it.
        filters: filters of documents, as in `tokenize`.
        filter_seconds: time limit of the filters of a document, as in `tokenize`.
        on_bad_document: stop at a bad document and at one on which a filter fails, or leave it out
            (quarantine); `tokenize` sets it aside.
        duplicates: files of documents to leave out, as in `tokenize`.
        unit: lines; paragraphs, between blank lines; or sequences of words.
        min_characters: length of the shortest line or paragraph.
        min_words: length of a sequence of words that is found for sure.
        edge_words: words that may be missed at either end of a sequence.
    """
    # These modules import pydantic, and `--help` should be instant.
    from tokamake.config.repeats import RepeatSettings
    from tokamake.config_files import validate
    from tokamake.data.corpus.passages import PASSAGE, make_finder

    settings = {"unit": unit, "min_characters": min_characters}
    settings |= {"min_words": min_words, "edge_words": edge_words}
    find = make_finder(validate(RepeatSettings, settings, "hash-passages"))
    fields = Fields(split_keys(text_key), template)
    source = DocumentSource(fields, format, filters, filter_seconds, on_bad_document, duplicates)
    shards = ((shard, _passages(blocks, find)) for shard, blocks in source.shards(plan, batch))
    made_from = {"settings": settings, **source.made_from()}
    num_passages = write_batch_rows(output, shards, dtype=PASSAGE, made_from=made_from)
    print(f"{output}: {counted(num_passages, 'passage')}")


def _passages(
    blocks: Iterator[FilteredBlock], find: "Callable[[str], Passages]"
) -> Iterator[npt.NDArray[Any]]:
    """Yield the passages of each block of a shard."""
    from tokamake.data.corpus.passages import PASSAGE

    first = 0
    for filtered in blocks:
        yield np.concatenate([np.zeros(0, PASSAGE), *_rows(filtered, find, first=first)])
        first += len(filtered.block.records)


def _rows(
    filtered: FilteredBlock, find: "Callable[[str], Passages]", *, first: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield the passages of each text; `first` is the number of the block's first document."""
    from tokamake.data.corpus.passages import PASSAGE

    texts = zip(*filtered.columns, strict=True)
    for index, columns in zip(filtered.kept.tolist(), texts, strict=True):
        for number, text in enumerate(columns):
            hashes, spans = find(text)
            rows = np.empty(len(hashes), PASSAGE)
            rows["hash"], rows["document"], rows["text"] = hashes, first + index, number
            rows["begin"], rows["end"] = spans[:, 0], spans[:, 1]
            yield rows
