"""Stage `sample_corpus`: write small corpora from the Python standard library of this machine."""

import ast
import gzip
import hashlib
import importlib
import json
import os
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from tokamake.config.data import SampleCorpus
from tokamake.config_files import parse_json
from tokamake.errors import UserError
from tokamake.files import atomic

# Tests, installed packages, and `encodings`: thousands of lines of character tables.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
_SHORTEST_DOCSTRING = 160
_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


KEYS = ("text", "src", "id")
"""Keys of the documents."""


def sample_corpus(*, settings: str, output: Path) -> None:
    """Write small corpora from the installed Python standard library.

    Documents are {"text", "src", "id"}. A hash of the source shuffles them, so that the last
    documents of a file, which are held out, are a random sample.

    Args:
        settings: the config's `sample_corpus` section as JSON: num_files and file_bytes for code
            (source files) and docs (docstrings and reference pages).
        output: folder for <corpus>/<corpus>-00.jsonl, ...; the last file of a corpus is gzipped.
    """
    sources = _read_sources()
    if not sources:
        raise UserError(f"sample_corpus: no Python sources in {_library()}; install them")
    samples = parse_json(dict[Literal["code", "docs"], SampleCorpus], settings, where="--settings")
    for corpus, sample in samples.items():
        _write_corpus(corpus, sample, sources=sources, folder=output / corpus)


def _write_corpus(
    corpus: str, sample: SampleCorpus, *, sources: list[tuple[str, str]], folder: Path
) -> None:
    documents = sorted(
        _EXTRACTORS[corpus](sources), key=lambda item: hashlib.sha256(item[0].encode()).digest()
    )
    lines = [
        json.dumps({"text": text, "src": source, "id": number}, ensure_ascii=False).encode() + b"\n"
        for number, (source, text) in enumerate(documents)
    ]
    names = sample_names(corpus, sample.num_files)
    for name, file_lines in zip(names, _fill_files(lines, sample), strict=True):
        if not file_lines:
            raise UserError(
                f"sample_corpus.{corpus}: num_files: {sample.num_files}: the standard "
                f"library does not fill this many files of {sample.file_bytes} bytes; lower "
                "num_files or file_bytes"
            )
        data = b"".join(file_lines)
        with atomic(folder / name) as (temporary,):
            # mtime=0: a time in the gzip header would change the bytes from run to run.
            temporary.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        print(f"{folder / name}: {len(file_lines):,} documents, {len(data):,} bytes")


def sample_names(corpus: str, num_files: int) -> list[str]:
    """Return the names of the files that `sample_corpus` writes for a corpus."""
    names = [f"{corpus}-{number:02d}.jsonl" for number in range(num_files)]
    return [*names[:-1], names[-1] + ".gz"]


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _read_sources() -> list[tuple[str, str]]:
    """Return (path, text) of all source files in UTF-8 except tests, sorted by path."""
    root = _library()
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Installed packages can be many times the library, so they are not even listed.
        subfolders[:] = set(subfolders) - _NOT_SOURCE
        paths += (Path(folder, name) for name in names if name.endswith(".py"))
    sources = []
    for path in sorted(paths):
        try:
            sources.append((path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return sources


def _code(sources: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((source, text) for source, text in sources if text.strip())


def _docs(sources: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen = set()
    for source, text in sources:
        for line, docstring in _docstrings(text):
            if len(docstring) >= _SHORTEST_DOCSTRING and docstring not in seen:
                seen.add(docstring)
                yield f"{source}:{line}", docstring
    topics = importlib.import_module("pydoc_data.topics").topics
    for name, page in topics.items():
        yield f"pydoc_data/topics:{name}", page


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the library has files for other Python versions
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    # Breadth first, as `ast.walk`, but not into expressions, which are most of the nodes.
    nodes = deque[ast.AST]([tree])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), docstring
        nodes += (child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS))


_EXTRACTORS = {"code": _code, "docs": _docs}


def _fill_files(lines: Iterable[bytes], sample: SampleCorpus) -> list[list[bytes]]:
    """Distribute lines to files up to their size; skip lines longer than 1/8 of a file."""
    files: list[list[bytes]] = [[] for _ in range(sample.num_files)]
    current = size = 0
    for line in lines:
        if len(line) > sample.file_bytes // 8:
            continue
        if size + len(line) > sample.file_bytes:
            current, size = current + 1, 0
            if current == sample.num_files:
                break
        files[current].append(line)
        size += len(line)
    return files
