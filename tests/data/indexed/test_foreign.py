"""Datasets of other programs are read once: lengths, pointers, smallest and largest token."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.megatron_datasets import overwrite, write_megatron_dataset
from tests.support.runs import vouch
from tokamake.data.indexed import foreign
from tokamake.data.indexed.foreign import check_foreign, stated_vocabulary
from tokamake.errors import UserError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a small dataset as many tasks and blocks as a large one."""
    monkeypatch.setattr(foreign, "_TASK_TOKENS", 70)
    monkeypatch.setattr(foreign, "_BLOCK_TOKENS", 16)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("position", [0, 15, 16, 69, 70, 499])
def test_the_largest_token_is_found_at_any_position(
    tmp_path: Path, dtype: type, position: int
) -> None:
    tokens = np.random.default_rng(1).integers(0, 200, 500)
    tokens[position] = 201
    prefix = write_megatron_dataset(tmp_path / "other", [tokens.tolist()], dtype, longest=90)
    assert check_foreign(prefix) == 201


@pytest.mark.parametrize("position", [0, 69, 70, 499])
def test_the_first_negative_token_is_named(tmp_path: Path, position: int) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[5] * 500], np.int32)
    for negative in (499, position):
        overwrite(tmp_path / "other.bin", 4 * negative, -1 - negative, "<i")
    message = rf"other\.bin: token {position} is {-1 - position}, below 0"
    with pytest.raises(UserError, match=message):
        check_foreign(prefix)


@pytest.mark.parametrize("bound", [-1, 0, 3, 2**62])
def test_document_bounds_that_do_not_ascend_are_refused(tmp_path: Path, bound: int) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[5], [6]])
    size = (tmp_path / "other.idx").stat().st_size
    overwrite(tmp_path / "other.idx", size - 8, bound, "<q")
    with pytest.raises(UserError, match=r"other\.idx: document bounds do not ascend from 0 to 2"):
        check_foreign(prefix)


def test_document_bounds_that_wrap_around_are_refused(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[5]] * 5)
    size = (tmp_path / "other.idx").stat().st_size
    for place, bound in enumerate((2**63 - 1, -(2**63), -1), 1):
        overwrite(tmp_path / "other.idx", size - 8 * (6 - place), bound, "<q")
    with pytest.raises(UserError, match=r"other\.idx: document bounds do not ascend from 0 to 5"):
        check_foreign(prefix)


def test_a_dataset_without_tokens_has_no_largest_token(tmp_path: Path) -> None:
    assert check_foreign(write_megatron_dataset(tmp_path / "other", [[], []])) == -1


def test_only_a_manifest_states_a_vocabulary(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(tmp_path / "other", [[1, 2]])
    assert stated_vocabulary(prefix) is None
    vouch(prefix)
    assert stated_vocabulary(prefix) is None
    vouch(prefix, vocab_size=7)
    assert stated_vocabulary(prefix) == 7
