"""Queries of a .npy file: other files and vectors without finite scores are refused in one line."""

from pathlib import Path

import numpy as np
import pytest

from tokamake.errors import UserError
from tokamake.retrieval.queries import open_queries


def test_rows_are_numbered(tmp_path: Path) -> None:
    vectors = np.arange(6, dtype=np.float64).reshape(3, 2)
    np.save(tmp_path / "q.npy", vectors)
    queries = open_queries(tmp_path / "q.npy")
    assert queries.ids.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(queries.vectors, vectors.astype(np.float32))


def test_archives_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "several.npz", np.ones((2, 16)))
    (tmp_path / "torn.npy").write_bytes((tmp_path / "several.npz").read_bytes()[:200])
    for name, message in [
        ("several.npz", "several.npz: an archive of arrays, not a .npy file; write it with numpy"),
        ("torn.npy", r"torn.npy: not a .npy file \(.*\); write it with numpy.save"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            open_queries(tmp_path / name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1e39, "q.npy: row 1 is not finite; fix the vector"),
        (3e38, r"q.npy: row 1 has values up to 3e\+38, so that scores could overflow; normalize"),
        (-3e38, r"q.npy: row 1 has values up to 3e\+38, so that scores could overflow; normalize"),
    ],
)
def test_too_large_queries_are_named(tmp_path: Path, value: float, message: str) -> None:
    np.save(tmp_path / "q.npy", np.full((2, 16), [[1], [value]]))
    with pytest.raises(UserError, match=message):
        open_queries(tmp_path / "q.npy")
