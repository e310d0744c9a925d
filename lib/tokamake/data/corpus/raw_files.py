"""Raw files of a corpus, on disk or declared, each with its size and a witness of its content.

The table of corpora names files, folders and patterns; `plan` makes shards of what they mean. One
`stat` a file tells all there is to know, so that 100,000 files take a second.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import NamedTuple

from tokamake.data.corpus.corpora import Corpus, patterns
from tokamake.data.readers import expand, natural_key
from tokamake.errors import UserError
from tokamake.files import digest


class RawFile(NamedTuple):
    """A raw file as the plan sees it."""

    path: str
    """Path as the user wrote it, relative to the folder of the run or absolute."""
    size: int
    """Bytes on disk; of a declared file, bytes of uncompressed text."""
    modified: int | None
    """Nanoseconds since the epoch; None for a declared file, which a job is still to make."""


def raw_files(corpus: Corpus, declared: Mapping[str, int]) -> list[RawFile]:
    """Raw files of a corpus in natural order; names mean what they mean to `readers.expand`.

    Args:
        corpus: row of the table.
        declared: path to size of files that are still to be made; what else lies beside them is
            left from an earlier declaration.

    Raises:
        UserError: a pattern matches nothing, or a file cannot be read.
    """
    made = {Path(path).parent.resolve() for path in declared}
    found: dict[object, RawFile] = {}
    for pattern in patterns(corpus):
        expression = re.compile(_glob_expression(pattern))
        number = 0
        for path, size in declared.items():
            if any(map(expression.fullmatch, (path, str(Path(path).absolute())))):
                found.setdefault(Path(path).resolve(), RawFile(path, size, None))
                number += 1
        for identity, file in _on_disk(_named(pattern), made, folders="**" not in pattern):
            found.setdefault(identity, file)  # the same file may have several names
            number += 1
        if not number:
            raise UserError(
                f'corpus "{corpus.corpus}": no file matches {pattern}; '
                "fix the files column of the corpora table"
            )
    return sorted(found.values(), key=lambda file: natural_key(file.path))


def stamp(files: Sequence[RawFile]) -> str:
    """Witness of sizes and times: another one where a file was changed, touched or removed."""
    parts = [
        "declared" if file.modified is None else f"{file.size}:{file.modified}" for file in files
    ]
    if len(parts) == 1:
        return parts[0]
    return digest([(file.path, part) for file, part in zip(files, parts, strict=True)])


def _named(pattern: str) -> list[str]:
    """Paths that a name stands for, in an order that tells which of a file's names counts."""
    return [pattern] if os.path.lexists(pattern) else sorted(glob(pattern, recursive=True))


def _on_disk(
    paths: Iterable[str], made: set[Path], *, folders: bool
) -> Iterator[tuple[object, RawFile]]:
    """Files among paths, or in folders among them, each with what tells it from other files."""
    skipped: dict[str, bool] = {}
    for path in paths:
        parent = path[: path.rfind("/") + 1] or "."
        if parent not in skipped:
            skipped[parent] = Path(parent).resolve() in made
        if skipped[parent]:
            continue
        try:
            status = os.stat(path)  # noqa: PTH116 (a Path for each file would double the time)
        except OSError as error:
            reason = error.strerror
            raise UserError(f"{path}: cannot be read ({reason}); mend or remove it") from None
        if stat.S_ISREG(status.st_mode):
            file = RawFile(path, status.st_size, status.st_mtime_ns)
            yield (status.st_dev, status.st_ino), file
        elif stat.S_ISDIR(status.st_mode) and folders:
            yield from _on_disk(map(str, expand([path])), made, folders=False)


def _glob_expression(pattern: str) -> str:
    """Regular expression of a glob pattern in which * stops at a slash and ** does not.

    Without any such sign it may be a folder, which stands for the files in it.
    """
    pieces = re.split(r"(\*\*/?|\*|\?|\[!?\]?[^\]]*\])", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(
        signs.get(piece)
        or (
            f"[{'^' * (piece[1] == '!')}{piece[1:].removeprefix('!')}"
            if piece[:1] == "["
            else re.escape(piece)
        )
        for piece in pieces
    )
    return expression if len(pieces) > 1 else f"{expression.removesuffix('/')}(?:/.*)?"
