"""Fill-in-the-middle compared with a reference on characters, and its rates."""

import hashlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.support.fim_samples import (
    EOD,
    MIDDLE,
    PREFIX,
    SEPARATOR,
    SLACK,
    SUFFIX,
    FixedSamples,
    plain,
    rearrange_rows,
    rearranged,
)
from tests.support.ranks import spawn
from tokamake.config.train_sections import FimSettings
from tokamake.data.samples.fim.transform import SampleRandom
from tokamake.data.samples.loader import PAD


def reference(
    row: np.ndarray, key: tuple[int, int], fim: FimSettings, tokenizer: tokenizers.Tokenizer
) -> list[int]:
    """The method on texts, for samples of whole characters. Does not truncate or pad."""
    bits = np.random.Philox(key=np.array(key, np.uint64))
    uniform = np.random.Generator(bits)

    def permuted(text: str, rate: float) -> list[list[int]]:
        if not text or uniform.random() >= rate:
            return []
        ends = sorted(bits.random_raw() * (len(text) + 1) // 2**64 for _ in range(2))
        p, m, s = text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :]
        p, m, s = (tokenizer.encode(part).ids for part in (p, m, s))
        if uniform.random() < fim.spm_rate:
            return [[PREFIX, SUFFIX], s, [MIDDLE], p, m]
        return [[PREFIX], p, [SUFFIX], s, [MIDDLE], m]

    parts: list[list[int]] = []
    for ends, group in itertools.groupby(row.tolist(), lambda token: token == EOD):
        ids = list(group)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert "\ufffd" not in text
        parts += [ids] if ends else permuted(text, fim.rate) or [ids]
    return [token for part in parts for token in part]


def original_text(ids: list[int], tokenizer: tokenizers.Tokenizer) -> str:
    """The original text of a document, rearranged or not."""
    if ids[:1] == [PREFIX]:
        marks = [ids.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE)]
        assert marks == sorted(marks)
        assert len([token for token in ids if token in (PREFIX, SUFFIX, MIDDLE)]) == 3
        first = ids[1 : marks[1]]
        suffix, middle = ids[marks[1] + 1 : marks[2]], ids[marks[2] + 1 :]
        # SPM: the prefix is directly before the middle.
        ids = first + middle + suffix
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("rate", "spm_rate"), [(1.0, 0.5), (0.6, 0.3), (1.0, 0.0), (1.0, 1.0)])
def test_samples_equal_the_reference(
    folder: Path, tokenizer: tokenizers.Tokenizer, rate: float, spm_rate: float
) -> None:
    samples, fim = plain(folder), FimSettings(rate=rate, spm_rate=spm_rate)
    fim_samples = rearranged(folder, samples, rate=rate, spm_rate=spm_rate)
    assert len(fim_samples) == len(samples) >= 150
    lengths = Counter()
    for number in range(len(fim_samples)):
        row = fim_samples[number]
        assert (row.dtype, row.shape) == (np.int64, (201,))
        tokens = reference(samples[number], (11, number), fim, tokenizer)
        lengths[np.sign(len(tokens) - 201)] += 1
        assert row.tolist() == (tokens + [PAD] * 201)[:201]
    assert lengths[1] > 50  # most samples grow by the special tokens and are truncated


def test_shorter_samples_are_padded(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    letters = [tokenizer.encode(letter).ids[0] for letter in "return the value" * 4]
    (row,) = rearrange_rows(folder, [letters], rate=1)
    padding = row.count(PAD)
    assert 0 < padding < len(row) == len(letters)
    assert row[-padding:] == [PAD] * padding
    assert original_text(row[:-padding], tokenizer) == "return the value" * 4
    again = rearranged(folder, FixedSamples([row]), rate=0)[0]
    assert again.tolist() == row  # earlier padding is not text


def test_incomplete_characters_and_special_tokens_are_kept(
    folder: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    """A sample may begin and end inside a character. Special tokens are not text."""
    smile = tokenizer.encode("\U0001f600").ids
    assert len(smile) > 2
    text = "a☃b\ufffdc" * 3
    row = [
        *smile[1:],
        *tokenizer.encode(text).ids,
        SEPARATOR,
        *tokenizer.encode("xy").ids,
        *smile[:-1],
    ]
    prefix_lengths = set()
    for seed in range(200):
        (tokens,) = rearrange_rows(folder, [row + SLACK], rate=1, spm_rate=0, seed=seed)
        prefix, suffix, middle = (tokens.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
        end = tokens.index(EOD)
        parts = tokens[prefix + 1 : suffix], tokens[middle + 1 : end], tokens[suffix + 1 : middle]
        whole = [token for part in parts for token in part]
        assert whole[: len(smile) - 1] == smile[1:]
        assert whole[1 - len(smile) :] == smile[:-1]
        assert whole.count(SEPARATOR) == 1
        inner = whole[len(smile) - 1 : 1 - len(smile)]
        assert tokenizer.decode(inner, skip_special_tokens=False) == f"{text}<file_sep>xy"
        prefix_lengths.add(suffix - prefix)
    assert len(prefix_lengths) > 10


def test_rates_are_kept(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Counts of rearranged documents are within five standard deviations of the rates."""
    text = "abcdefgh" * 5
    count, rate, spm_rate = 4000, 0.3, 0.7
    rows = [[*tokenizer.encode(text).ids, *SLACK[:60]]] * count
    rearranged_rows = rearrange_rows(folder, rows, rate=rate, spm_rate=spm_rate)
    chosen = [row for row in rearranged_rows if row[0] == PREFIX]
    spread = (count * rate * (1 - rate)) ** 0.5
    assert abs(len(chosen) - count * rate) < 5 * spread
    suffix_first = sum(row[1] == SUFFIX for row in chosen)
    # PSM with an empty prefix begins in the same way.
    empty = (1 - spm_rate) * (2 * 41 - 1) / 41**2
    expected = len(chosen) * (spm_rate + empty)
    assert abs(suffix_first - expected) < 5 * (len(chosen) * 0.25) ** 0.5
    assert all(original_text(row[: row.index(EOD)], tokenizer) == text for row in rearranged_rows)


def test_all_cuts_are_equally_likely(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Two cuts of 3 characters: each of the 4 x 4 pairs of places is equally likely."""
    count = 8000
    rows = [[*tokenizer.encode("xyz").ids, *SLACK[:10]]] * count
    cuts = Counter()
    for row in rearrange_rows(folder, rows, rate=1, spm_rate=0):
        suffix, middle = row.index(SUFFIX), row.index(MIDDLE)
        prefix = tokenizer.decode(row[1:suffix])
        cuts[len(prefix), 3 - len(tokenizer.decode(row[suffix + 1 : middle]))] += 1
    for first, last in itertools.combinations_with_replacement(range(4), 2):
        share = (1 if first == last else 2) / 16
        assert abs(cuts[first, last] - count * share) < 5 * (count * share) ** 0.5
    assert cuts.total() == count


def test_fragments_are_rearranged_separately(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    texts = ["first file", "", "second one"]
    ids = [tokenizer.encode(text).ids for text in texts]
    row = [*ids[0], SEPARATOR, *ids[1], SEPARATOR, *ids[2], *SLACK[:40]]
    count, settings = 2000, {"rate": 0.5, "fragment_rate": 0.25, "split_token": "<file_sep>"}
    chosen = Counter()
    for tokens in rearrange_rows(folder, [row] * count, **settings):
        document = tokens[: tokens.index(EOD)]
        first, second = (place for place, token in enumerate(document) if token == SEPARATOR)
        assert second == first + 1
        parts = document[:first], document[second + 1 :]
        assert [original_text(part, tokenizer) for part in parts] == [texts[0], texts[2]]
        chosen[tuple(part[0] == PREFIX for part in parts)] += 1
    for both, share in {(True, True): 1 / 32, (True, False): 3 / 32, (False, True): 3 / 32}.items():
        assert abs(chosen[both] - count * share) < 5 * (count * share) ** 0.5
    whole = rearrange_rows(folder, [row], rate=1, split_token="<file_sep>", fragment_rate=0)
    assert whole == [row]
    # A document without the split token is rearranged at `rate`, for any `fragment_rate`.
    (alone,) = rearrange_rows(
        folder, [[*ids[0], *SLACK]], rate=1, split_token="<file_sep>", fragment_rate=0
    )
    assert alone[0] == PREFIX


def digests(folder: Path, numbers: list[int]) -> dict[str, str]:
    samples = rearranged(folder, plain(folder), rate=0.9)
    return {str(n): hashlib.sha256(samples[n].tobytes()).hexdigest() for n in numbers}


def test_samples_are_the_same_in_any_order(folder: Path) -> None:
    numbers = list(range(60))
    here = digests(folder, numbers)
    assert len(set(here.values())) == 60
    assert digests(folder, numbers[::-1] + numbers) == here


@pytest.mark.grid
def test_samples_are_the_same_in_another_process(folder: Path) -> None:
    (there,) = spawn(digests, 1, folder, [50, 3, 59])
    assert there == digests(folder, [3, 50, 59])


def philox(key: list[int], counter: list[int]) -> list[int]:
    """Four words of Philox-4x64-10, as in its paper."""
    for _ in range(10):
        high_a, low_a = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high_b, low_b = divmod(0xCA5A826395121157 * counter[2], 2**64)
        counter = [high_b ^ counter[1] ^ key[0], low_b, high_a ^ counter[3] ^ key[1], low_a]
        key = [(key[0] + 0x9E3779B97F4A7C15) % 2**64, (key[1] + 0xBB67AE8584CAA73B) % 2**64]
    return counter


@pytest.mark.parametrize("key", [[0, 0], [1234, 5_000_000_000], [2**64 - 1, 1]])
def test_random_numbers_depend_only_on_seed_and_sample(key: list[int]) -> None:
    words = [word for block in (1, 2, 3) for word in philox(key, [block, 0, 0, 0])]
    random = SampleRandom(*key)
    for word in words[:6]:
        assert random.below(1000) == word * 1000 // 2**64
    for word in words[6:]:
        assert random.happens(0.5) == (word < 2**63)
    assert SampleRandom(*key).happens(1)
    assert not SampleRandom(*key).happens(0)


def test_rate_0_keeps_samples(folder: Path) -> None:
    samples = plain(folder)
    fim_samples = rearranged(folder, samples)
    for number in range(len(samples)):
        np.testing.assert_array_equal(fim_samples[number], samples[number], strict=True)
        assert fim_samples.corpus_of(number) == "code"
        assert fim_samples.spans(number) == samples.spans(number)
    numbers = samples.samples_of("code", 4)
    np.testing.assert_array_equal(fim_samples.samples_of("code", 4), numbers, strict=True)
    assert fim_samples.sequence_length == 200
    with pytest.raises(IndexError):
        fim_samples[len(samples)]
