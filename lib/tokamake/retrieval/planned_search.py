"""Checks of a search before any vector exists: files, numbers, the string of an index."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from tokamake.config.retrieval import FaissSettings, Match, RetrievalSettings
from tokamake.errors import UserError, naming
from tokamake.retrieval import faiss_index
from tokamake.retrieval.evidence import read_evidence
from tokamake.retrieval.questions import read_questions

_MOST = 100_000
"""Passages that are read at most: 21 million take minutes."""
_INSTALL = "this Python environment lacks; run `pip install 'tokamake[retrieval]'`"


def check_questions(files: Mapping[str, Path], *, match: Match) -> None:
    """Read all questions; refuse a broken row, and a file of passages."""
    for name, path in files.items():
        with naming(f"questions.{name}"):
            read_questions(path, match=match)


def check_passages(paths: Sequence[Path], settings: RetrievalSettings) -> None:
    """Read the first passages of each file, and count them as far as the settings need it."""
    index = settings.index
    centroids = faiss_index.num_centroids(index.factory) if index else 0
    wanted = min(_MOST, max(settings.top_k, faiss_index.WANTED_PER_CENTROID * centroids))
    number = 0
    with naming("passages"):
        for path in paths:
            most = max(1, wanted - number)
            number += sum(1 for _ in islice(read_evidence([path]), most))
    if number < settings.top_k <= _MOST:
        raise UserError(
            f"top_k: {settings.top_k:,}: there are only {number:,} passages; give at most as many"
        )
    if index and number < _MOST:
        # A note goes to standard error: standard output of a dry run has its jobs.
        with _naming_settings("index"), redirect_stdout(sys.stderr):
            faiss_index.sample_size(index.factory, index.train_vectors, num_vectors=number)


def check_index(index: FaissSettings, *, dimension: int | None) -> None:
    """Refuse a string that FAISS does not know, and parameters that its index does not have.

    Args:
        dimension: length of a vector; None: it is not known yet.
    """
    if find_spec("faiss") is None:
        raise UserError(f"index: needs faiss, which {_INSTALL}, or remove the index")
    if dimension is not None:
        check_factory(index, dimension=dimension, section="index")


def check_factory(index: FaissSettings, *, dimension: int, section: str) -> None:
    """Refuse a string that FAISS does not know, a sample that is too small, and parameters that the
    index does not have.

    Args:
        section: name of the section that has the settings, for messages.
    """
    centroids = faiss_index.num_centroids(index.factory)
    if 0 < index.train_vectors < centroids:
        raise UserError(
            f"{section}.train_vectors: {index.train_vectors:,}: fewer than the {centroids:,} "
            f"centroids of {index.factory}; raise it, or set it to 0"
        )
    with _naming_settings(section):
        empty = faiss_index.empty_index(index.factory, dimension=dimension, seed=index.seed)
    given = {"nprobe": ("nprobe", index.nprobe), "ef_search": ("efSearch", index.ef_search)}
    for setting, (name, value) in given.items():
        if value:
            option = f"{section}.{setting}"
            faiss_index.set_parameter(
                empty, name, value=value, factory=index.factory, option=option
            )


def check_bm25() -> None:
    """Check that the package of BM25 is installed."""
    if find_spec("bm25s") is None:
        raise UserError(f"bm25: needs bm25s, which {_INSTALL}, or set retrieval.bm25 to false")


@contextmanager
def _naming_settings(section: str) -> Iterator[None]:
    """Name settings of a section in place of options."""
    try:
        yield
    except UserError as error:
        text = re.sub(r"--([a-z-]+)", lambda match: match[1].replace("-", "_"), str(error))
        raise UserError(f"{section}.{text}") from None
