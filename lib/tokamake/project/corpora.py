"""Corpora behind the names that a user gives: files, their first documents, and the text key."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokamake.data.corpus.corpora import LIKE_NUMBER
from tokamake.data.corpus.raw_files import SUFFIXES
from tokamake.data.corpus.text_keys import FirstDocuments, first_documents, guess_text_key
from tokamake.data.readers import COMPRESSION_SUFFIXES, expand, is_one_document
from tokamake.errors import UserError
from tokamake.remote.addresses import is_remote

_MOST_FILES = 32
"""Files of a corpus whose first documents are read, evenly spaced."""
_TEXT_PER_BYTE = {**dict.fromkeys(COMPRESSION_SUFFIXES, 3), ".parquet": 2}
"""Bytes of text in a byte of a compressed file, roughly."""


@dataclass
class FoundCorpus:
    """Raw files of one text key."""

    name: str
    patterns: list[str]
    """Names and patterns of the files, as paths from anywhere."""
    files: list[Path]
    text_key: str
    first: list[FirstDocuments]
    """First documents of some of the files."""

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(path.stat().st_size for path in self.files)

    @property
    def text_bytes(self) -> int:
        """Bytes of text, roughly."""
        return sum(p.stat().st_size * _TEXT_PER_BYTE.get(p.suffix, 1) for p in self.files)

    @property
    def keys(self) -> list[str]:
        """Keys of its documents."""
        return [*dict.fromkeys(key for each in self.first for key in each.texts)]

    @property
    def first_texts(self) -> Iterator[str]:
        """Texts of the first documents."""
        for each in self.first:
            for key in self.text_key.split(","):
                yield from each.texts.get(key, [])

    @property
    def num_documents(self) -> int | None:
        """Number of documents; None: there are more than were read."""
        if self.first and all(is_one_document(each.format) for each in self.first):
            return len(self.files)
        is_known = len(self.first) == len(self.files) and all(each.is_all for each in self.first)
        return sum(each.number for each in self.first) if is_known else None


def find_corpora(names: Sequence[str], *, text_key: str = "") -> list[FoundCorpus]:
    """Find the files behind names, and the key of their text.

    A folder or pattern is a corpus. Files of one folder are a corpus, too. Files with different
    text keys are different corpora.

    Raises:
        UserError: a name matches nothing, a file cannot be read or is in two corpora, or no key
            holds text.
    """
    corpora: list[FoundCorpus] = []
    for patterns in _groups([*dict.fromkeys(names)]):
        files = expand(patterns)
        _refuse_datasets(files)
        _refuse_twice(files, corpora)
        step = max(1, len(files) // _MOST_FILES)
        first = [first_documents(path) for path in files[::step]]
        keys = {text_key or guess_text_key(first)}
        if keys == {""}:
            keys = {_own_key(each) for each in first if not each.is_empty}
        if not keys:
            raise UserError(f"{patterns[0]}: holds no document; name other files")
        if len(keys) == 1:
            key = keys.pop()
            _check_key(first, key)
            name = _name(patterns, corpora)
            corpora.append(FoundCorpus(name, patterns, files, key, first))
            continue
        if step > 1:
            raise UserError(
                f"{patterns[0]}: its files have their text under different keys "
                f"({', '.join(sorted(keys))}); give a pattern for the files of each key"
            )
        for key in sorted(keys):
            own = [each for each in first if not each.is_empty and _own_key(each) == key]
            paths = [each.path for each in own]
            name = _name([*map(str, paths)], corpora)
            corpora.append(FoundCorpus(name, [*map(str, paths)], paths, key, own))
    return corpora


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Names of each corpus: a folder or pattern alone, and the files of each folder together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        _check_name(name)
        is_file = Path(name).is_file()
        folder = str(Path(name).absolute().parent) if is_file else name
        groups.setdefault(folder, []).append(name)
    return [_as_pattern(group) for group in groups.values()]


def _as_pattern(files: list[str]) -> list[str]:
    """A pattern for several files, if they are all files of their folder with their suffixes."""
    paths = [Path(name) for name in files]
    suffixes = {"".join(path.suffixes[-2:]) for path in paths}
    if len(paths) == 1 or len(suffixes) > 1 or suffixes == {""}:
        return files
    pattern = f"{glob.escape(str(paths[0].parent))}/*{suffixes.pop()}"
    return [pattern] if {*map(Path, glob.glob(pattern))} == {*paths} else files


def _check_name(name: str) -> None:
    if is_remote(name):
        raise UserError(
            f"{name}: an address; make the project with files on disk, then write the address into "
            "the column files of its table of corpora"
        )
    if not name or not name.isprintable():
        raise UserError(f"{name!r}: not a name that a table can hold; rename the file or folder")
    if "{" in name or "}" in name:
        raise UserError(
            f"{name}: braces in a path are wildcards of Snakemake; rename the file or folder, or "
            "give a link to it"
        )
    if os.path.lexists(name) and not Path(name).exists():
        raise UserError(f"{name}: a link to a missing file; fix or remove it")
    if not os.path.lexists(name) and not glob.has_magic(name):
        raise UserError(f"{name}: no such file or folder; fix the path")


def _refuse_datasets(files: Sequence[Path]) -> None:
    for path in files:
        _check_name(str(path))
        if path.suffix in SUFFIXES and path.with_suffix(SUFFIXES[1]).exists():
            raise UserError(
                f"{path}: an indexed dataset, not raw text; its row in a table of corpora needs "
                "the format indexed"
            )


def _refuse_twice(files: Sequence[Path], corpora: Sequence[FoundCorpus]) -> None:
    """Refuse files of other corpora: their text would count twice."""
    others = {absolute(path): corpus.name for corpus in corpora for path in corpus.files}
    for path in files:
        if other := others.get(absolute(path)):
            raise UserError(f"{path}: the corpus {other} has this file, too; name it once")


def _own_key(first: FirstDocuments) -> str:
    """Text key of a single file."""
    if key := guess_text_key([first]):
        return key
    raise UserError(
        f"{first.path}: no key holds text, among {', '.join(first.texts) or 'none'}; name it with "
        "--text-key, or join several by the column template of a table of corpora"
    )


def _check_key(first: Sequence[FirstDocuments], key: str) -> None:
    """Check that files have text under a key, which a user may have named."""
    for each in first:
        if not each.is_empty and not all(each.texts.get(name) for name in key.split(",")):
            raise UserError(
                f"{each.path}: no text under the key {key}, among "
                f"{', '.join(each.texts) or 'none'}; name the key of the text"
            )


def _name(patterns: Sequence[str], others: Sequence[FoundCorpus]) -> str:
    """Name of a corpus: its file's without suffixes, or its folder's; a number makes it unique."""
    path = Path(patterns[0]).absolute()
    is_alone = len(patterns) == 1 and path.is_file()
    fixed = Path(re.split(r"[*?\[]", str(path))[0] + "_")  # the folder of a pattern
    stem = path.name.partition(".")[0] if is_alone else path.name
    if not path.exists() or len(patterns) > 1:
        stem = (path if path.exists() else fixed).parent.name
    name = word(stem)
    taken = {corpus.name for corpus in others}
    numbers = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return next(each for each in (name, *numbers) if each not in taken)


def absolute(name: str | Path) -> Path:
    """Absolute path without `..`; links stay, since a link may stand for a name with braces."""
    return Path(os.path.normpath(Path(name).absolute()))


def word(name: str, default: str = "corpus") -> str:
    """A name as a word that can be part of file names."""
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    return (text.replace("_", "-") if LIKE_NUMBER.search(f"{text}_") else text) or default
