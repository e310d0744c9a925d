"""Where tokens of rearranged samples come from, against their characters told one by one."""

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
    Given,
    is_plain,
    plain,
    prepare,
    rearranged,
)
from tokamake.data.samples.fim.origins import NOWHERE
from tokamake.data.samples.loader import PAD

ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()


@pytest.fixture(scope="module")
def folder(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens, a pair of it and an index."""
    return prepare(tmp_path_factory.mktemp("fim"), sorted((sampled / "raw").rglob("*.*")))


@pytest.fixture(scope="module")
def own(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer in its own package."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))


def num_bytes(token: int, own: tokenizers.Tokenizer) -> int:
    """Bytes of a token of text: it is spelt with one sign for each."""
    spelt = own.id_to_token(token)
    assert set(spelt) <= set(ALPHABET)
    return len(spelt)


def begins(ids: list[int], own: tokenizers.Tokenizer) -> list[int]:
    """Byte that each token begins at, and the end."""
    return np.cumsum([0, *(num_bytes(token, own) for token in ids)]).tolist()


def holders(ids: list[int], text: str, own: tokenizers.Tokenizer) -> list[list[int]]:
    """For each character of a text, the tokens that hold a byte of it; told by bytes alone."""
    assert begins(ids, own)[-1] == len(text.encode())
    of_bytes = [number for number, token in enumerate(ids) for _ in range(num_bytes(token, own))]
    ends = np.cumsum([0, *(len(character.encode()) for character in text)]).tolist()
    return [sorted(set(of_bytes[first:last])) for first, last in pairwise(ends)]


def expected(made: list[int], document: list[int], own: tokenizers.Tokenizer) -> list[int]:
    """Origins within a document of whole characters of what was made of it."""
    if made[:1] != [PREFIX]:
        return list(range(len(document)))
    text = own.decode(document, skip_special_tokens=False)
    plain_holders = holders(document, text, own)
    marks = [made.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE)]
    parts = [made[first + 1 : last] for first, last in pairwise([*marks, len(made)])]
    texts = [own.decode(part, skip_special_tokens=False) for part in parts]
    # By suffix first, nothing stands before the suffix, and prefix and middle are one text.
    assert texts[0] + texts[2] + texts[1] == text
    starts = 0, len(texts[0]) + len(texts[2]), len(texts[0])
    found = []
    for start, part, held in zip(starts, parts, texts, strict=True):
        origin = {}
        for place, tokens in enumerate(holders(part, held, own)):
            of_text = plain_holders[start + place]
            for nth, token in enumerate(tokens):
                origin.setdefault(token, of_text[min(nth, len(of_text) - 1)])
        found += [NOWHERE, *(origin[token] for token in range(len(part)))]
    return found


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_rows_and_origins_of_samples(
    folder: Path, own: tokenizers.Tokenizer, spm_rate: float
) -> None:
    samples = plain(folder)
    found = rearranged(folder, samples, rate=0.7, spm_rate=spm_rate)
    left_out = 0
    for number in range(len(found)):
        tokens, origins, marks, more = found.traced(number)
        np.testing.assert_array_equal(tokens, found[number], strict=True)
        assert (origins.dtype, origins.shape) == (np.int64, (201,))
        assert marks == {PREFIX: "<fim_prefix>", SUFFIX: "<fim_suffix>", MIDDLE: "<fim_middle>"}
        nowhere = origins == NOWHERE
        np.testing.assert_array_equal(nowhere, np.isin(tokens, [PAD, *marks]))
        # Documents stay in order, so that no token moves from one to another.
        row = samples[number]
        document = np.cumsum(row == EOD) - (row == EOD)
        of_row = np.cumsum(tokens == EOD) - (tokens == EOD)
        np.testing.assert_array_equal(document[origins[~nowhere]], of_row[~nowhere])
        np.testing.assert_array_equal(tokens[~nowhere] == EOD, row[origins[~nowhere]] == EOD)
        left_out += more > 0
    assert left_out > 50


TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n☃日\U0001f600é\ufffd"), st.characters(exclude_categories=["Cs"])
    ),
    min_size=1,
    max_size=30,
).filter(is_plain)


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), data=st.data())
def test_origins_by_bytes(
    folder: Path, own: tokenizers.Tokenizer, texts: list[str], data: st.DataObject
) -> None:
    """Also of text that was encoded in other words than ours: one piece for each few letters."""
    documents = []
    for text in texts:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=3)))
        parts = [text[first:last] for first, last in pairwise([0, *cuts, len(text)])]
        ids = [token for part in parts for token in own.encode(part).ids]
        documents.append(ids)
    row = [token for ids in documents for token in [*ids, EOD]]
    seed = data.draw(st.integers(0, 2**64 - 1))
    samples = rearranged(folder, Given([row + SLACK]), rate=0.8, seed=seed)
    tokens, origins = (array.tolist() for array in samples.traced(0)[:2])
    at = start = 0
    for ids in documents:
        end = tokens.index(EOD, at)
        wanted = expected(tokens[at:end], ids, own)
        assert origins[at:end] == [NOWHERE if o == NOWHERE else start + o for o in wanted]
        start += len(ids)
        assert origins[end] == start
        at, start = end + 1, start + 1
    left = tokens[at:].index(PAD) if PAD in tokens[at:] else len(tokens) - at
    assert origins[at : at + left] == list(range(start, start + left))
    assert set(origins[at + left :]) <= {NOWHERE}


def test_kept_tokens_come_from_where_they_stood(folder: Path, own: tokenizers.Tokenizer) -> None:
    """Bits of characters and special tokens of the data, the rearrangement's own among them."""
    smile = own.encode("\U0001f600").ids
    row = [*smile[1:], *own.encode("ab☃").ids, SEPARATOR, MIDDLE, *own.encode("x").ids, *smile[:-1]]
    kept = {place for place, token in enumerate(row) if token in (SEPARATOR, MIDDLE)}
    kept |= {*range(len(smile) - 1), *range(len(row) - len(smile) + 1, len(row))}
    for seed in range(60):
        samples = rearranged(folder, Given([row + SLACK]), rate=1, seed=seed)
        tokens, origins, _, left_out = samples.traced(0)
        end = tokens.tolist().index(EOD)
        assert sorted(set(origins[:end].tolist()) - {NOWHERE}) == list(range(len(row)))
        assert (origins[:end] == NOWHERE).sum() == 3
        for place in kept:
            (at,) = np.flatnonzero(origins == place)
            assert tokens[at] == row[place]
        assert left_out == end - len(row)


def test_padding_comes_from_nowhere(folder: Path, own: tokenizers.Tokenizer) -> None:
    letters = [own.encode(letter).ids[0] for letter in "return the value" * 4]
    tokens, origins, _, left_out = rearranged(folder, Given([letters]), rate=1).traced(0)
    assert left_out == 0
    padded = tokens == PAD
    assert padded.sum() > 0
    assert (origins[padded] == NOWHERE).all()
    assert (origins == NOWHERE).sum() == padded.sum() + 3
    # A token of several letters comes from the first one.
    text = own.decode(letters)
    for token, origin in zip(tokens[origins >= 0], origins[origins >= 0], strict=True):
        assert text[origin:].startswith(own.decode([int(token)]))


def test_parts_of_a_document_come_from_themselves(folder: Path, own: tokenizers.Tokenizer) -> None:
    ids = own.encode("first file").ids, own.encode("the second").ids
    row = [*ids[0], SEPARATOR, *ids[1]]
    settings = {"rate": 1, "fragment_rate": 0.5, "split_token": "<file_sep>"}
    for seed in range(40):
        samples = rearranged(folder, Given([row + SLACK]), seed=seed, **settings)
        tokens, origins = (array.tolist() for array in samples.traced(0)[:2])
        split, end = tokens.index(SEPARATOR), tokens.index(EOD)
        assert origins[split] == len(ids[0])
        second = [o - len(ids[0]) - 1 for o in origins[split + 1 : end] if o != NOWHERE]
        assert origins[:split] == expected(tokens[:split], ids[0], own)
        wanted = expected(tokens[split + 1 : end], ids[1], own)
        assert second == [origin for origin in wanted if origin != NOWHERE]
