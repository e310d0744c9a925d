"""Tables of Unicode in files of the cache, which any fault of a file leaves right."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tokamake.data.tokenizers import _unicode_tables as unicode_tables
from tokamake.data.tokenizers._normalization import compile_normalizer
from tokamake.data.tokenizers._patterns import compile_pattern, matching
from tokamake.data.tokenizers._unicode_tables import kept

TABLE = np.arange(1001) % 7 == 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of tables, which has no files yet."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    unicode_tables._folder.cache_clear()
    folder = unicode_tables._folder()
    assert folder is not None
    yield folder
    unicode_tables._folder.cache_clear()


def unasked() -> unicode_tables.Flags:
    raise AssertionError("the package is asked again")


def test_a_table_is_made_once(cache: Path) -> None:
    assert np.array_equal(kept("sevens", lambda: TABLE), TABLE)
    again = kept("sevens", unasked)
    assert again.dtype == bool
    assert np.array_equal(again, TABLE)
    assert np.array_equal(kept("others", lambda: ~TABLE), ~TABLE)
    assert len([*cache.iterdir()]) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:0],
        lambda content: content[:-1],
        lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
        lambda content: content[:32] + bytes(8) + content[40:],
        lambda content: content + b"\0",
    ],
    ids=["empty", "short", "flipped bit", "length", "long"],
)
def test_a_damaged_file_is_made_again(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    kept("sevens", lambda: TABLE)
    (path,) = cache.iterdir()
    right = path.read_bytes()
    path.write_bytes(damage(right))
    assert np.array_equal(kept("sevens", lambda: TABLE), TABLE)
    assert path.read_bytes() == right


def test_the_file_of_another_table_is_not_taken(cache: Path) -> None:
    kept("sevens", lambda: TABLE)
    (path,) = cache.iterdir()
    content = path.read_bytes()
    path.unlink()
    kept("others", lambda: ~TABLE)
    (path,) = cache.iterdir()
    path.write_bytes(content)
    assert np.array_equal(kept("others", lambda: ~TABLE), ~TABLE)


def test_a_cache_that_cannot_be_written_changes_nothing(cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file in place of the folder")
    assert np.array_equal(kept("sevens", lambda: TABLE), TABLE)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    unicode_tables._folder.cache_clear()
    for _ in range(2):
        assert np.array_equal(kept("sevens", lambda: TABLE), TABLE)
    assert unicode_tables._folder() is None


def test_another_version_has_other_tables(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept("sevens", lambda: TABLE)
    monkeypatch.setattr(tokenizers, "__version__", "9.9")
    unicode_tables._folder.cache_clear()
    assert unicode_tables._folder() != cache
    assert np.array_equal(kept("sevens", lambda: ~TABLE), ~TABLE)


def test_a_second_start_asks_the_package_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of Qwen2's expression and of NFC are those of the first start."""
    expression, form = r"(?i:'s)|\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", b'{"type":"NFC"}'
    functions = (matching, compile_pattern, compile_normalizer)

    def start() -> tuple[list[np.ndarray], np.ndarray]:
        for function in functions:
            function.cache_clear()
        return [*compile_pattern(expression)], compile_normalizer(form).arguments["marks"]

    tables, marks = start()
    assert len([*cache.iterdir()]) >= 6
    monkeypatch.setattr("tokamake.data.tokenizers._patterns._matching", unasked)
    monkeypatch.setattr("tokamake.data.tokenizers._normalization._marks", unasked)
    again, marks_again = start()
    for function in functions:
        function.cache_clear()
    assert all(map(np.array_equal, tables, again))
    assert marks_again.dtype == np.uint8
    assert np.array_equal(marks, marks_again)
    assert marks.sum() > 1000
