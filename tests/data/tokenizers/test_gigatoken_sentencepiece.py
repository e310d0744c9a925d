"""gigatoken with SentencePiece models and tokenizer.json files converted from them."""

import json
from itertools import product

import numpy as np
import pytest
import sentencepiece

from tests.support.gigatoken_texts import (
    Json,
    fast_sentencepiece,
    random_texts,
    sentencepiece_model,
)
from tokamake.data.tokenizers._exactness import json_refusal, sentencepiece_refusal
from tokamake.data.tokenizers._unicode_differences import load_encoders

PREPEND: Json = {"type": "Prepend", "prepend": "\u2581"}
SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "accepted"),
    [
        ({"type": "Sequence", "normalizers": [PREPEND, SPACES]}, None, True),
        (SPACES, None, True),
        *(
            (
                None,
                {
                    "type": "Metaspace",
                    "replacement": "\u2581",
                    "prepend_scheme": scheme,
                    "split": False,
                },
                True,
            )
            for scheme in ("first", "always", "never")
        ),
        (
            None,
            {
                "type": "Metaspace",
                "replacement": "\u2581",
                "prepend_scheme": "first",
                "split": True,
            },
            False,
        ),
        ({"type": "NFKC"}, None, False),
        (PREPEND, None, False),
    ],
    ids=str,
)
def test_converted_models_give_the_same_tokens_or_are_refused(
    normalizer: Json | None, pre_tokenizer: Json | None, accepted: bool
) -> None:
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    tokenizer = json.loads(sentencepiece_to_tokenizer_json(sentencepiece_model()))
    tokenizer |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    text = json.dumps(tokenizer)
    assert (json_refusal(text.encode()) == "") == accepted
    if accepted:
        reference, fast = load_encoders(text)
        texts = random_texts(3000, seed=7)
        assert reference(texts) == fast(texts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_dummy_prefix": False},
        {"split_by_whitespace": False, "split_by_unicode_script": False, "split_digits": True},
        {"control_symbols": ["<ctl>", "the"], "unk_piece": "foo", "bos_id": -1},
    ],
    ids=str,
)
def test_sentencepiece_models_give_the_same_tokens(changes: Json) -> None:
    model = sentencepiece_model(**changes)
    assert sentencepiece_refusal(model) == ""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    runs = ["".join(runs) for size in range(1, 7) for runs in product("ab \u2581", repeat=size)]
    texts = [*random_texts(5000, seed=8), *runs, *(" " * n + "a" for n in range(80))]
    assert processor.encode(texts, num_threads=1) == fast_sentencepiece(model)(texts)


@pytest.mark.grid
def test_every_code_point_gives_the_same_tokens() -> None:
    model = sentencepiece_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    fast = fast_sentencepiece(model)
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(f"a{c}b {c} {c}{c}" for c in characters[start : start + 256])
        for start in range(0, len(characters), 256)
    ]
    assert processor.encode(texts, num_threads=2) == fast(texts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unigram"}, "it is a unigram model"),
        ({"byte_fallback": False}, "it has no byte_fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalizes text"),
        ({"remove_extra_whitespaces": True}, "it removes extra whitespace"),
        ({"treat_whitespace_as_suffix": True}, "it marks spaces in another way"),
        ({"user_defined_symbols": ["<q>"]}, "it has user-defined or unused pieces"),
    ],
    ids=str,
)
def test_models_that_are_not_exact_are_refused(changes: Json, reason: str) -> None:
    assert sentencepiece_refusal(sentencepiece_model(**changes)) == reason


def test_pieces_that_are_not_exact_are_refused() -> None:
    def piece(text: str, score: float, kind: int = 1) -> bytes:
        fields = b"\x0a" + bytes([len(text.encode())]) + text.encode()
        fields += b"\x15" + np.float32(score).tobytes() + bytes([3 << 3, kind])
        return b"\x0a" + bytes([len(fields)]) + fields

    model = sentencepiece_model()
    spaces = b"".join(piece("\u2581" * size, -1e9) for size in (20, 21, 22))  # like Llama-2
    assert sentencepiece_refusal(model + spaces) == ""
    texts = [" " * size + end for size in range(100) for end in ("", "a")]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model + spaces)
    assert processor.encode(texts, num_threads=1) == fast_sentencepiece(model + spaces)(texts)
    equal_scores = piece("qzqz", -7e8) + piece("zqzq", -7e8)
    assert sentencepiece_refusal(model + equal_scores) == "two of its pieces have the same score"
    spelled = piece("</", -7e8) + piece("s>", -8e8)
    assert sentencepiece_refusal(model + spelled) == "its pieces spell out a special piece"
