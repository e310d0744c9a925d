"""Origins of the tokens of rearranged samples, compared with a reference on bytes."""

from itertools import pairwise
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
    FixedSamples,
    is_plain,
    plain,
    rearranged,
)
from tokamake.data.samples.fim.origins import NOWHERE
from tokamake.data.samples.loader import PAD

ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()


def num_bytes(token: int, tokenizer: tokenizers.Tokenizer) -> int:
    """Bytes of a text token. The byte-level vocabulary has one character for each byte."""
    spelling = tokenizer.id_to_token(token)
    assert set(spelling) <= set(ALPHABET)
    return len(spelling)


def byte_starts(ids: list[int], tokenizer: tokenizers.Tokenizer) -> list[int]:
    """First byte of each token, and the end."""
    return np.cumsum([0, *(num_bytes(token, tokenizer) for token in ids)]).tolist()


def tokens_of_characters(
    ids: list[int], text: str, tokenizer: tokenizers.Tokenizer
) -> list[list[int]]:
    """For each character of a text, the tokens that hold a byte of it."""
    assert byte_starts(ids, tokenizer)[-1] == len(text.encode())
    of_bytes = [
        number for number, token in enumerate(ids) for _ in range(num_bytes(token, tokenizer))
    ]
    ends = np.cumsum([0, *(len(character.encode()) for character in text)]).tolist()
    return [sorted(set(of_bytes[first:last])) for first, last in pairwise(ends)]


def expected(tokens: list[int], document: list[int], tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Origins, within a document of whole characters, of its rearranged tokens."""
    if tokens[:1] != [PREFIX]:
        return list(range(len(document)))
    text = tokenizer.decode(document, skip_special_tokens=False)
    plain_tokens = tokens_of_characters(document, text, tokenizer)
    marks = [tokens.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE)]
    parts = [tokens[first + 1 : last] for first, last in pairwise([*marks, len(tokens)])]
    texts = [tokenizer.decode(part, skip_special_tokens=False) for part in parts]
    # SPM: the prefix part is empty, and prefix and middle are one text.
    assert texts[0] + texts[2] + texts[1] == text
    starts = 0, len(texts[0]) + len(texts[2]), len(texts[0])
    origins = []
    for start, part, part_text in zip(starts, parts, texts, strict=True):
        origin = {}
        for place, numbers in enumerate(tokens_of_characters(part, part_text, tokenizer)):
            plain_numbers = plain_tokens[start + place]
            for nth, number in enumerate(numbers):
                origin.setdefault(number, plain_numbers[min(nth, len(plain_numbers) - 1)])
        origins += [NOWHERE, *(origin[number] for number in range(len(part)))]
    return origins


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_rows_and_origins_of_samples(
    folder: Path, tokenizer: tokenizers.Tokenizer, spm_rate: float
) -> None:
    samples = plain(folder)
    fim_samples = rearranged(folder, samples, rate=0.7, spm_rate=spm_rate)
    num_truncated = 0
    for number in range(len(fim_samples)):
        tokens, origins, marks, num_left_out = fim_samples.trace(number)
        np.testing.assert_array_equal(tokens, fim_samples[number], strict=True)
        assert (origins.dtype, origins.shape) == (np.int64, (201,))
        assert marks == {PREFIX: "<fim_prefix>", SUFFIX: "<fim_suffix>", MIDDLE: "<fim_middle>"}
        nowhere = origins == NOWHERE
        np.testing.assert_array_equal(nowhere, np.isin(tokens, [PAD, *marks]))
        # No token moves to another document.
        row = samples[number]
        document = np.cumsum(row == EOD) - (row == EOD)
        row_document = np.cumsum(tokens == EOD) - (tokens == EOD)
        np.testing.assert_array_equal(document[origins[~nowhere]], row_document[~nowhere])
        np.testing.assert_array_equal(tokens[~nowhere] == EOD, row[origins[~nowhere]] == EOD)
        num_truncated += num_left_out > 0
    assert num_truncated > 50


TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n☃日\U0001f600é\ufffd"), st.characters(exclude_categories=["Cs"])
    ),
    min_size=1,
    max_size=30,
).filter(is_plain)


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), data=st.data())
def test_origins_equal_a_reference_on_bytes(
    folder: Path, tokenizer: tokenizers.Tokenizer, texts: list[str], data: st.DataObject
) -> None:
    """Also for documents in another encoding: texts are encoded in short parts."""
    documents = []
    for text in texts:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=3)))
        parts = [text[first:last] for first, last in pairwise([0, *cuts, len(text)])]
        ids = [token for part in parts for token in tokenizer.encode(part).ids]
        documents.append(ids)
    row = [token for ids in documents for token in [*ids, EOD]]
    seed = data.draw(st.integers(0, 2**64 - 1))
    samples = rearranged(folder, FixedSamples([row + SLACK]), rate=0.8, seed=seed)
    tokens, origins = (array.tolist() for array in samples.trace(0)[:2])
    at = start = 0
    for ids in documents:
        end = tokens.index(EOD, at)
        reference = expected(tokens[at:end], ids, tokenizer)
        assert origins[at:end] == [NOWHERE if o == NOWHERE else start + o for o in reference]
        start += len(ids)
        assert origins[end] == start
        at, start = end + 1, start + 1
    left = tokens[at:].index(PAD) if PAD in tokens[at:] else len(tokens) - at
    assert origins[at : at + left] == list(range(start, start + left))
    assert set(origins[at + left :]) <= {NOWHERE}


def test_kept_tokens_come_from_their_own_position(
    folder: Path, tokenizer: tokenizers.Tokenizer
) -> None:
    """Incomplete characters and special tokens in the data, also those of the rearrangement."""
    smile = tokenizer.encode("\U0001f600").ids
    row = [
        *smile[1:],
        *tokenizer.encode("ab☃").ids,
        SEPARATOR,
        MIDDLE,
        *tokenizer.encode("x").ids,
        *smile[:-1],
    ]
    kept = {place for place, token in enumerate(row) if token in (SEPARATOR, MIDDLE)}
    kept |= {*range(len(smile) - 1), *range(len(row) - len(smile) + 1, len(row))}
    for seed in range(60):
        samples = rearranged(folder, FixedSamples([row + SLACK]), rate=1, seed=seed)
        tokens, origins, _, left_out = samples.trace(0)
        end = tokens.tolist().index(EOD)
        assert sorted(set(origins[:end].tolist()) - {NOWHERE}) == list(range(len(row)))
        assert (origins[:end] == NOWHERE).sum() == 3
        for place in kept:
            (at,) = np.flatnonzero(origins == place)
            assert tokens[at] == row[place]
        assert left_out == end - len(row)


def test_padding_has_no_origin(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    letters = [tokenizer.encode(letter).ids[0] for letter in "return the value" * 4]
    tokens, origins, _, left_out = rearranged(folder, FixedSamples([letters]), rate=1).trace(0)
    assert left_out == 0
    padded = tokens == PAD
    assert padded.sum() > 0
    assert (origins[padded] == NOWHERE).all()
    assert (origins == NOWHERE).sum() == padded.sum() + 3
    # A token of several letters comes from the first one.
    text = tokenizer.decode(letters)
    for token, origin in zip(tokens[origins >= 0], origins[origins >= 0], strict=True):
        assert text[origin:].startswith(tokenizer.decode([int(token)]))


def test_fragments_come_from_themselves(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    ids = tokenizer.encode("first file").ids, tokenizer.encode("the second").ids
    row = [*ids[0], SEPARATOR, *ids[1]]
    settings = {"rate": 1, "fragment_rate": 0.5, "split_token": "<file_sep>"}
    for seed in range(40):
        samples = rearranged(folder, FixedSamples([row + SLACK]), seed=seed, **settings)
        tokens, origins = (array.tolist() for array in samples.trace(0)[:2])
        split, end = tokens.index(SEPARATOR), tokens.index(EOD)
        assert origins[split] == len(ids[0])
        second = [o - len(ids[0]) - 1 for o in origins[split + 1 : end] if o != NOWHERE]
        assert origins[:split] == expected(tokens[:split], ids[0], tokenizer)
        reference = expected(tokens[split + 1 : end], ids[1], tokenizer)
        assert second == [origin for origin in reference if origin != NOWHERE]
