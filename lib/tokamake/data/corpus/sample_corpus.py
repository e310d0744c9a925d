"""Stage `sample_corpus`: real text that every machine has, the Python standard library's.

`code` holds source files; `docs` holds docstrings and the language reference that pydoc carries.
"""

import ast
import gzip
import hashlib
import importlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from tokamake.config.data import SampleCorpus
from tokamake.errors import UserError
from tokamake.files import atomic
from tokamake.validation import parse_json

# Besides tests and what is installed, `encodings`: thousands of lines of character tables.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
_SHORTEST_DOCSTRING = 160


def sample_corpus(*, settings: str, output: Path) -> None:
    """Harvest small corpora from the installed Python standard library.

    Documents {"text", "src", "id"} come in an order shuffled by a hash of their source, so that the
    last ones of a file, which are held out, look like the others.

    Args:
        settings: the config's `sample_corpus` section as JSON: for code (source files) and docs
            (docstrings and reference pages), num_files and file_bytes.
        output: folder of <corpus>/<corpus>-00.jsonl, ...; the last file of a corpus is gzipped.

    Raises:
        UserError: the standard library's sources are not installed.
    """
    sources = _sources()
    if not sources:
        raise UserError(f"sample_corpus: no Python sources in {_library()}; install them")
    wanted = parse_json(dict[Literal["code", "docs"], SampleCorpus], settings, "--settings")
    for corpus, sample in wanted.items():
        _write(corpus, sample, sources, output / corpus)


def _write(corpus: str, sample: SampleCorpus, sources: list[tuple[str, str]], folder: Path) -> None:
    documents = sorted(
        _HARVESTS[corpus](sources), key=lambda d: hashlib.sha256(d[0].encode()).digest()
    )
    lines = [
        json.dumps({"text": text, "src": source, "id": number}, ensure_ascii=False).encode() + b"\n"
        for number, (source, text) in enumerate(documents)
    ]
    names = sample_names(corpus, sample.num_files)
    for name, part in zip(names, _fill(lines, sample), strict=True):
        if not part:
            raise UserError(
                f"sample_corpus.{corpus}: num_files: {sample.num_files}: the standard library does "
                f"not fill so many of {sample.file_bytes} bytes; lower num_files or file_bytes"
            )
        data = b"".join(part)
        with atomic(folder / name) as (temporary,):
            temporary.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        print(f"{folder / name}: {len(part):,} documents, {len(data):,} bytes")


def sample_names(corpus: str, num_files: int) -> list[str]:
    """File names that `sample_corpus` writes."""
    names = [f"{corpus}-{number:02d}.jsonl" for number in range(num_files)]
    return [*names[:-1], names[-1] + ".gz"]


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _sources() -> list[tuple[str, str]]:
    """(module path, text) of every source file that is UTF-8, tests aside, in a stable order."""
    root = _library()
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _NOT_SOURCE.isdisjoint(relative.parts):
            try:
                sources.append((relative.as_posix(), path.read_text(encoding="utf-8")))
            except UnicodeDecodeError:
                continue
    return sources


def _code(sources: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((source, text) for source, text in sources if text.strip())


def _docs(sources: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen = set()
    for source, text in sources:
        for place, docstring in _docstrings(text):
            if len(docstring) >= _SHORTEST_DOCSTRING and docstring not in seen:
                seen.add(docstring)
                yield f"{source}:{place}", docstring
    topics = importlib.import_module("pydoc_data.topics").topics
    for name, page in topics.items():
        yield f"pydoc_data/topics:{name}", page


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:  # the library carries files for other Python versions
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (docstring := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), docstring


_HARVESTS = {"code": _code, "docs": _docs}


def _fill(lines: Iterable[bytes], sample: SampleCorpus) -> list[list[bytes]]:
    """Deal lines out file by file, each up to its size; lines over 1/8 of a file are left out."""
    parts: list[list[bytes]] = [[] for _ in range(sample.num_files)]
    current = size = 0
    for line in lines:
        if len(line) > sample.file_bytes // 8:
            continue
        if size + len(line) > sample.file_bytes:
            current, size = current + 1, 0
            if current == sample.num_files:
                break
        parts[current].append(line)
        size += len(line)
    return parts
