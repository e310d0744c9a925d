"""Tool `show-near-duplicates`: texts of the largest clusters of a table of near-duplicates."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake.errors import UserError
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from tokamake.data.corpus.documents import Fields

_MISSING = "(not found: the file has moved or changed, or has another text_key or format)"
_COLUMNS = ("file", "byte", "line")
_CLUSTER = ("kept_file", "kept_shard", "kept_document")
"""Columns that tell clusters apart; shards of other data folders may have the same name."""


def show_near_duplicates(
    table: Path,
    /,
    *,
    clusters: int = 10,
    documents: int = 3,
    text_key: tuple[str, ...] = (),
    template: str = "",
    format: str = "",
    data_root: Path = Path(),
    max_characters: int = 300,
) -> None:
    """Show the documents of the largest clusters of near-duplicates, as they are in the raw files.

    The kept document of each cluster comes first. Dropped documents begin shortly before their
    first difference from it: [-...-] has text of the kept document alone, {+...+} new text.

    Args:
        table: table of near-duplicates of a data folder, near_duplicates/*.parquet.
        clusters: number of clusters, the largest ones first.
        documents: number of dropped documents of each cluster.
        text_key: key or column that holds the text; several keys are shown together.
        template: text of a document as a combination of keys.
        format: format of the raw files, if it cannot be detected.
        data_root: folder that relative paths of raw files start from.
        max_characters: number of characters of each text.
    """
    for name, value in (("clusters", clusters), ("documents", documents)):
        if value < 1:
            raise UserError(f"--{name} {value}: give at least 1")
    if max_characters < 1:
        raise UserError(f"--max-characters {max_characters}: give at least 1")
    from tokamake.data.corpus.documents import Fields, split_keys

    fields = Fields(split_keys(text_key), template).checked()
    num_dropped, num_clusters, largest = _largest(table, clusters=clusters, documents=documents)
    print(f"{table}: {counted(num_dropped, 'document')} near to {num_clusters:,} kept before")
    shown = [place for cluster in largest for place in (cluster.kept, *cluster.dropped)]
    texts = _texts(shown, fields, format=format, data_root=data_root)
    for number, (size, kept, dropped) in enumerate(largest, 1):
        print(f"\n{number}. {size + 1:,} documents, kept: {kept}")
        print(f"   {_shown(texts.get(kept), size=max_characters)}")
        for place in dropped:
            print(f"   dropped: {place}")
            print(f"   {_shown(texts.get(place), texts.get(kept), size=max_characters)}")
        if size > len(dropped):
            print(f"   and {size - len(dropped):,} more")


class _Place(NamedTuple):
    """Place of a document in the raw files."""

    file: str
    byte: int | None
    """First byte of its line; None: its file has none."""
    number: int | None
    """Number of its line, row, record or page, if it has no byte."""

    def __str__(self) -> str:
        kind = f"byte {self.byte}" if self.byte is not None else f"number {self.number}"
        return f"{self.file}: {kind}"


class _Cluster(NamedTuple):
    size: int
    """Number of dropped documents."""
    kept: _Place
    dropped: list[_Place]
    """The first of them."""


def _largest(table: Path, *, clusters: int, documents: int) -> tuple[int, int, list[_Cluster]]:
    """Numbers of dropped and of kept documents, and the largest clusters, in the table's order."""
    import pyarrow as arrow
    from pyarrow.compute import field

    rows = _read_table(table)
    rows = rows.append_column("row", arrow.array(range(rows.num_rows), arrow.int64()))
    groups = rows.group_by(_CLUSTER).aggregate([("row", "count"), ("row", "min")])
    order = [("row_count", "descending"), ("row_min", "ascending")]
    found = []
    for group in groups.sort_by(order).slice(0, clusters).to_pylist():
        file, shard, document = (field(name) == group[name] for name in _CLUSTER)
        dropped = rows.filter(file & shard & document).slice(0, documents).to_pylist()
        kept, *places = (
            _Place(*(row[prefix + name] for name in _COLUMNS))
            for row, prefix in [(dropped[0], "kept_"), *((row, "") for row in dropped)]
        )
        found.append(_Cluster(group["row_count"], kept, places))
    return rows.num_rows, groups.num_rows, found


def _read_table(path: Path) -> Any:
    """Read the columns of a table of near-duplicates that name documents."""
    import pyarrow as arrow
    from pyarrow import parquet

    columns = [*_CLUSTER, *(prefix + name for prefix in ("", "kept_") for name in _COLUMNS)]
    remedy = "name near_duplicates/*.parquet of a data folder"
    try:
        rows = parquet.read_table(path, columns=[*dict.fromkeys(columns)])
    except (OSError, arrow.ArrowException) as error:
        fault = str(error).splitlines()[0][:200]
        raise UserError(f"{path}: is no table of near-duplicates ({fault}); {remedy}") from None
    if missing := [name for name in columns if name not in rows.column_names]:
        raise UserError(f"{path}: has no column {missing[0]}; {remedy}")
    return rows


def _texts(
    places: Iterable[_Place], fields: "Fields", *, format: str, data_root: Path
) -> dict[_Place, str]:
    """Texts of the places whose files still have them."""
    by_file: dict[Path, set[_Place]] = defaultdict(set)
    for place in places:
        by_file[data_root / place.file].add(place)
    return {
        place: text
        for path, wanted in by_file.items()
        if path.is_file()
        for place, text in _read(path, wanted, fields=fields, format=format)
    }


def _read(
    path: Path, wanted: set[_Place], *, fields: "Fields", format: str
) -> Iterator[tuple[_Place, str]]:
    """Yield the texts of places of one file: lines from their bytes on, others in file order."""
    from tokamake.data.readers import open_input
    from tokamake.data.readers._input import readers

    source = open_input(path, format=format)
    starts = {place.byte for place in wanted}
    if readers()[source.format].HAS_BYTE_RANGES and None not in starts:
        size = path.stat().st_size
        for place in (each for each in wanted if (each.byte or 0) < size):
            at = open_input(path, byte_range=(place.byte or 0, None), format=format)
            yield from _of_block(next(at.blocks(fields.read_keys), None), {place}, fields=fields)
        return
    left = set(wanted)
    for block in source.blocks(fields.read_keys):
        for place, text in _of_block(block, left, fields=fields):
            left.discard(place)
            yield place, text
        if not left:
            return


def _of_block(
    block: Any, wanted: Iterable[_Place], *, fields: "Fields"
) -> list[tuple[_Place, str]]:
    """Texts of the places that a block has."""
    from tokamake.data.corpus.documents import texts

    if block is None:
        return []
    indices = {offset: index for index, offset in enumerate(block.offsets.tolist())}
    numbers = {number: index for index, number in enumerate(block.numbers.tolist())}
    found = []
    for place in wanted:
        known = numbers.get(place.number) if place.byte is None else indices.get(place.byte)
        if known is not None:
            found.append((place, known))
    if not found:
        return []
    columns, kept, _ = texts(block, fields)
    positions = {index: position for position, index in enumerate(kept.tolist())}
    return [
        (place, _joined(columns, positions[index])) for place, index in found if index in positions
    ]


def _joined(columns: Sequence[Sequence[str]], position: int) -> str:
    return "\n".join(column[position] for column in columns)


def _shown(text: str | None, kept: str | None = None, *, size: int) -> str:
    """A text as one line; with the text that was kept, from a bit before the first difference."""
    from tokamake.report.filter_trial import marked, printable

    if text is None:
        return _MISSING
    if kept is None:
        return printable(_window(text, 0, size=size))
    if text == kept:
        return "(the same text)"
    shortest = min(len(kept), len(text))
    differing = (index for index in range(shortest) if kept[index] != text[index])
    start = max(0, next(differing, shortest) - size // 4)
    return marked(_window(kept, start, size=size), _window(text, start, size=size))


def _window(text: str, start: int, *, size: int) -> str:
    """Some characters of a text, with marks where it is cut."""
    end = "…" if len(text) > start + size else ""
    return f"{'…' if start else ''}{text[start : start + size]}{end}"
