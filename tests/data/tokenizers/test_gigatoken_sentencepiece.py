"""gigatoken with SentencePiece models, and tokenizer.json files made of such."""

import json
from itertools import product

import numpy as np
import pytest
import sentencepiece

from tests.support.gigatoken_texts import Json, fast_sentencepiece, made_up, sentencepiece_model
from tokamake.data.tokenizers._exactness import json_refusal, sentencepiece_refusal
from tokamake.data.tokenizers._unicode_differences import encoders

PIECES: Json = {"type": "Prepend", "prepend": "\u2581"}
SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "taken"),
    [
        ({"type": "Sequence", "normalizers": [PIECES, SPACES]}, None, True),
        (SPACES, None, True),
        *(
            (
                None,
                {
                    "type": "Metaspace",
                    "replacement": "\u2581",
                    "prepend_scheme": how,
                    "split": False,
                },
                True,
            )
            for how in ("first", "always", "never")
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
        (PIECES, None, False),
    ],
    ids=str,
)
def test_sentencepiece_like_tokenizer_json(
    normalizer: Json | None, pre_tokenizer: Json | None, taken: bool
) -> None:
    from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

    tokenizer = json.loads(sentencepiece_to_tokenizer_json(sentencepiece_model()))
    tokenizer |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    text = json.dumps(tokenizer)
    assert (json_refusal(text.encode()) == "") == taken
    if taken:
        reference, fast = encoders(text)
        texts = made_up(3000, seed=7)
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
def test_sentencepiece(changes: Json) -> None:
    model = sentencepiece_model(**changes)
    assert sentencepiece_refusal(model) == ""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    runs = ["".join(runs) for size in range(1, 7) for runs in product("ab \u2581", repeat=size)]
    texts = [*made_up(5000, seed=8), *runs, *(" " * n + "a" for n in range(80))]
    assert processor.encode(texts, num_threads=1) == fast_sentencepiece(model)(texts)


def test_sentencepiece_takes_every_code_point() -> None:
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
def test_sentencepiece_models_that_are_refused(changes: Json, reason: str) -> None:
    assert sentencepiece_refusal(sentencepiece_model(**changes)) == reason


def test_sentencepiece_pieces_that_are_refused() -> None:
    def piece(text: str, score: float, kind: int = 1) -> bytes:
        number = np.float32(score).tobytes()
        inner = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + number
        inner += bytes([3 << 3, kind])
        return b"\x0a" + bytes([len(inner)]) + inner

    model = sentencepiece_model()
    spaces = b"".join(piece("\u2581" * size, -1e9) for size in (20, 21, 22))  # as Llama-2 has them
    assert sentencepiece_refusal(model + spaces) == ""
    texts = [" " * size + end for size in range(100) for end in ("", "a")]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model + spaces)
    assert processor.encode(texts, num_threads=1) == fast_sentencepiece(model + spaces)(texts)
    alike = piece("qzqz", -7e8) + piece("zqzq", -7e8)
    assert sentencepiece_refusal(model + alike) == "two of its pieces have the same score"
    spelt = piece("</", -7e8) + piece("s>", -8e8)
    assert sentencepiece_refusal(model + spelt) == "its pieces spell out a special piece"
