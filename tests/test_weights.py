"""Reading weighting files, whole and broken."""

from pathlib import Path

import pytest

from tokamake.data.weights import Weighted, read_weights
from tokamake.errors import UserError


def test_reads_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    path.write_text("0.75 merged/b-0000 b\n\n 25e-2\tmerged/a.x-0000 a\n")
    assert read_weights(path) == [
        Weighted(0.75, "merged/b-0000", "b"),
        Weighted(0.25, "merged/a.x-0000", "a"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no weight above 0"),
        ("0 a a\n", "no weight above 0"),
        ("1 a\n", ":1: 2 columns"),
        ("1 a a\n1 b b c\n", ":2: 4 columns"),
        ("-1 a a\n", ":1: weight '-1'"),
        ("nan a a\n", ":1: weight 'nan'"),
        ("inf a a\n", ":1: weight 'inf'"),
        ("half a a\n", ":1: weight 'half'"),
        ("1 a a\n\n1 a a\n", ":3: a stands in line 1"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "weights.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_weights(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.txt"
    with pytest.raises(UserError, match="no such file"):
        read_weights(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="UTF-8"):
        read_weights(path)
