"""Fill-in-the-middle against a reference on characters: what is made, how often, and of what."""

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fim_samples import (
    EOD,
    MIDDLE,
    PREFIX,
    SEPARATOR,
    SLACK,
    SUFFIX,
    Given,
    is_plain,
    of_rows,
    plain,
    prepare,
    rearranged,
)
from tests.support.paths import ROOT
from tokamake.data.samples.fim.documents import Chance
from tokamake.data.samples.fim.tokens import Fim
from tokamake.data.samples.loader import PAD, batches


@pytest.fixture(scope="module")
def folder(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens, a pair of it and an index."""
    return prepare(tmp_path_factory.mktemp("fim"), sorted((sampled / "raw").rglob("*.*")))


@pytest.fixture(scope="module")
def own(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer in its own package."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))


def reference(
    row: np.ndarray, key: tuple[int, int], fim: Fim, own: tokenizers.Tokenizer
) -> list[int]:
    """The method once more, on texts, for samples of whole characters; neither cut nor padded."""
    bits = np.random.Philox(key=np.array(key, np.uint64))
    uniform = np.random.Generator(bits)

    def permuted(text: str, rate: float) -> list[list[int]]:
        if not text or uniform.random() >= rate:
            return []
        ends = sorted(bits.random_raw() * (len(text) + 1) // 2**64 for _ in range(2))
        p, m, s = text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :]
        p, m, s = (own.encode(part).ids for part in (p, m, s))
        if uniform.random() < fim.spm_rate:
            return [[PREFIX, SUFFIX], s, [MIDDLE], p, m]
        return [[PREFIX], p, [SUFFIX], s, [MIDDLE], m]

    made: list[list[int]] = []
    for ends, group in itertools.groupby(row.tolist(), lambda token: token == EOD):
        ids = list(group)
        text = own.decode(ids, skip_special_tokens=False)
        assert "\ufffd" not in text
        made += [ids] if ends else permuted(text, fim.rate) or [ids]
    return [token for part in made for token in part]


def undone(ids: list[int], own: tokenizers.Tokenizer) -> str:
    """The text of a rearranged document; that of another as it is."""
    if ids[:1] == [PREFIX]:
        marks = [ids.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE)]
        assert marks == sorted(marks)
        assert len([token for token in ids if token in (PREFIX, SUFFIX, MIDDLE)]) == 3
        first = ids[1 : marks[1]]
        suffix, middle = ids[marks[1] + 1 : marks[2]], ids[marks[2] + 1 :]
        # By suffix first, the prefix stands before the middle, with nothing between them.
        ids = first + middle + suffix
    return own.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("rate", "spm_rate"), [(1.0, 0.5), (0.6, 0.3), (1.0, 0.0), (1.0, 1.0)])
def test_equals_the_reference(
    folder: Path, own: tokenizers.Tokenizer, rate: float, spm_rate: float
) -> None:
    samples, fim = plain(folder), Fim(rate=rate, spm_rate=spm_rate)
    found = rearranged(folder, samples, rate=rate, spm_rate=spm_rate)
    assert len(found) == len(samples) >= 150
    lengths = Counter()
    for number in range(len(found)):
        row = found[number]
        assert (row.dtype, row.shape) == (np.int64, (201,))
        wanted = reference(samples[number], (11, number), fim, own)
        lengths[np.sign(len(wanted) - 201)] += 1
        assert row.tolist() == (wanted + [PAD] * 201)[:201]
    assert lengths[1] > 50  # samples grow by the special tokens, as a rule, and are cut


def test_shorter_samples_are_filled_up(folder: Path, own: tokenizers.Tokenizer) -> None:
    letters = [own.encode(letter).ids[0] for letter in "return the value" * 4]
    (row,) = of_rows(folder, [letters], rate=1)
    padding = row.count(PAD)
    assert 0 < padding < len(row) == len(letters)
    assert row[-padding:] == [PAD] * padding
    assert undone(row[:-padding], own) == "return the value" * 4
    again = rearranged(folder, Given([row]), rate=0)[0]
    assert again.tolist() == row  # what was filled up before is no text


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
        is_plain
    ),
    data=st.data(),
)
def test_nothing_is_lost(
    folder: Path, own: tokenizers.Tokenizer, text: str, data: st.DataObject
) -> None:
    texts = [text, data.draw(st.sampled_from(["", "\n x", "日本語", text + "\n" + text]))]
    row = [token for part in texts for token in [*own.encode(part).ids, EOD]]
    (made,) = of_rows(folder, [row + SLACK], rate=1, seed=data.draw(st.integers(0, 2**64 - 1)))
    for part in texts:
        end = made.index(EOD)
        assert (made[0] == PREFIX) == bool(part)
        assert undone(made[:end], own) == own.decode(
            own.encode(part).ids, skip_special_tokens=False
        )
        made = made[end + 1 :]
    assert set(made) <= {EOD}


def test_bits_of_characters_and_special_tokens_stay_whole(
    folder: Path, own: tokenizers.Tokenizer
) -> None:
    """A sample may begin and end within a character, and special tokens are no text."""
    smile = own.encode("\U0001f600").ids
    assert len(smile) > 2
    text = "a☃b\ufffdc" * 3
    row = [*smile[1:], *own.encode(text).ids, SEPARATOR, *own.encode("xy").ids, *smile[:-1]]
    seen = set()
    for seed in range(200):
        (made,) = of_rows(folder, [row + SLACK], rate=1, spm_rate=0, seed=seed)
        prefix, suffix, middle = (made.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
        end = made.index(EOD)
        parts = made[prefix + 1 : suffix], made[middle + 1 : end], made[suffix + 1 : middle]
        whole = [token for part in parts for token in part]
        assert whole[: len(smile) - 1] == smile[1:]
        assert whole[1 - len(smile) :] == smile[:-1]
        assert whole.count(SEPARATOR) == 1
        inner = whole[len(smile) - 1 : 1 - len(smile)]
        assert own.decode(inner, skip_special_tokens=False) == f"{text}<file_sep>xy"
        seen.add(suffix - prefix)
    assert len(seen) > 10


def test_rates(folder: Path, own: tokenizers.Tokenizer) -> None:
    """Numbers of rearranged documents are within five standard deviations of what is asked."""
    text = "abcdefgh" * 5
    count, rate, spm_rate = 4000, 0.3, 0.7
    rows = [[*own.encode(text).ids, *SLACK[:60]]] * count
    made = of_rows(folder, rows, rate=rate, spm_rate=spm_rate)
    chosen = [row for row in made if row[0] == PREFIX]
    spread = (count * rate * (1 - rate)) ** 0.5
    assert abs(len(chosen) - count * rate) < 5 * spread
    suffix_first = sum(row[1] == SUFFIX for row in chosen)
    # The other order begins in the same way where the prefix is empty.
    empty = (1 - spm_rate) * (2 * 41 - 1) / 41**2
    wanted = len(chosen) * (spm_rate + empty)
    assert abs(suffix_first - wanted) < 5 * (len(chosen) * 0.25) ** 0.5
    assert all(undone(row[: row.index(EOD)], own) == text for row in made)


def test_cuts_are_everywhere_alike(folder: Path, own: tokenizers.Tokenizer) -> None:
    """Two cuts of a text of 3 characters: each pair of 4 x 4 places is as likely."""
    count = 8000
    rows = [[*own.encode("xyz").ids, *SLACK[:10]]] * count
    found = Counter()
    for row in of_rows(folder, rows, rate=1, spm_rate=0):
        suffix, middle = row.index(SUFFIX), row.index(MIDDLE)
        prefix = own.decode(row[1:suffix])
        found[len(prefix), 3 - len(own.decode(row[suffix + 1 : middle]))] += 1
    for first, last in itertools.combinations_with_replacement(range(4), 2):
        share = (1 if first == last else 2) / 16
        assert abs(found[first, last] - count * share) < 5 * (count * share) ** 0.5
    assert found.total() == count


def test_parts_of_a_document(folder: Path, own: tokenizers.Tokenizer) -> None:
    texts = ["first file", "", "second one"]
    ids = [own.encode(text).ids for text in texts]
    row = [*ids[0], SEPARATOR, *ids[1], SEPARATOR, *ids[2], *SLACK[:40]]
    count, settings = 2000, {"rate": 0.5, "fragment_rate": 0.25, "split_token": "<file_sep>"}
    chosen = Counter()
    for made in of_rows(folder, [row] * count, **settings):
        kept = made[: made.index(EOD)]
        first, second = (place for place, token in enumerate(kept) if token == SEPARATOR)
        assert second == first + 1
        parts = kept[:first], kept[second + 1 :]
        assert [undone(part, own) for part in parts] == [texts[0], texts[2]]
        chosen[tuple(part[0] == PREFIX for part in parts)] += 1
    for both, share in {(True, True): 1 / 32, (True, False): 3 / 32, (False, True): 3 / 32}.items():
        assert abs(chosen[both] - count * share) < 5 * (count * share) ** 0.5
    whole = of_rows(folder, [row], rate=1, split_token="<file_sep>", fragment_rate=0)
    assert whole == [row]
    # A document that no such token parts is rearranged at `rate`, whatever `fragment_rate` is.
    (alone,) = of_rows(
        folder, [[*ids[0], *SLACK]], rate=1, split_token="<file_sep>", fragment_rate=0
    )
    assert alone[0] == PREFIX


def digests(folder: Path, numbers: list[int]) -> dict[str, str]:
    found = rearranged(folder, plain(folder), rate=0.9)
    return {str(n): hashlib.sha256(found[n].tobytes()).hexdigest() for n in numbers}


def test_the_same_in_any_order_and_process(folder: Path) -> None:
    numbers = list(range(60))
    here = digests(folder, numbers)
    assert len(set(here.values())) == 60
    assert digests(folder, numbers[::-1] + numbers) == here
    program = (
        "import json, pathlib, sys; sys.path.insert(0, sys.argv[2]);"
        "from tests.data.samples.fim import test_samples\n"
        "found = test_samples.digests(pathlib.Path(sys.argv[1]), [50, 3, 59])\n"
        "print(json.dumps(found))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    assert json.loads(there.stdout) == {number: here[number] for number in ("50", "3", "59")}


def philox(key: list[int], counter: list[int]) -> list[int]:
    """Four words of Philox-4x64-10, from its paper."""
    for _ in range(10):
        high_a, low_a = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high_b, low_b = divmod(0xCA5A826395121157 * counter[2], 2**64)
        counter = [high_b ^ counter[1] ^ key[0], low_b, high_a ^ counter[3] ^ key[1], low_a]
        key = [(key[0] + 0x9E3779B97F4A7C15) % 2**64, (key[1] + 0xBB67AE8584CAA73B) % 2**64]
    return counter


@pytest.mark.parametrize("key", [[0, 0], [1234, 5_000_000_000], [2**64 - 1, 1]])
def test_chance_is_a_function_of_seed_and_sample(key: list[int]) -> None:
    words = [word for block in (1, 2, 3) for word in philox(key, [block, 0, 0, 0])]
    made = Chance(*key)
    for word in words[:6]:
        assert made.below(1000) == word * 1000 // 2**64
    for word in words[6:]:
        assert made.happens(0.5) == (word < 2**63)
    assert Chance(*key).happens(1)
    assert not Chance(*key).happens(0)


def test_batches_of_any_number_of_ranks(folder: Path) -> None:
    found = rearranged(folder, plain(folder), rate=0.5)
    for ranks, consumed in ((1, 0), (3, 0), (3, 24)):
        made = [
            batches(
                found,
                consumed_samples=consumed,
                micro_batch_size=4,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
            )
            for rank in range(ranks)
        ]
        rows = np.concatenate([next(of_rank) for of_rank in made])
        wanted = np.stack([found[consumed + number] for number in range(4 * ranks)])
        np.testing.assert_array_equal(rows, wanted)


def test_at_rate_0_samples_are_as_they_were(folder: Path) -> None:
    samples = plain(folder)
    found = rearranged(folder, samples)
    for number in range(len(samples)):
        np.testing.assert_array_equal(found[number], samples[number], strict=True)
        assert found.source(number) == "code"
        assert found.pieces(number) == samples.pieces(number)
    np.testing.assert_array_equal(found.seen("code", 4), samples.seen("code", 4), strict=True)
    assert found.sequence_length == 200
    with pytest.raises(IndexError):
        found[len(samples)]
