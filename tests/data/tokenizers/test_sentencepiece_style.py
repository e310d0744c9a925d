"""lib/csrc gives the tokens of SentencePiece models and of tokenizer.json files in their style."""

import json
from itertools import product

import numpy as np
import pytest
import sentencepiece
import tokenizers

from tests.support.tokenizer_texts import (
    Encode,
    Json,
    added,
    encoders,
    random_texts,
    sentencepiece_model,
)
from tokamake.data.tokenizers import _sentencepiece_model as parser

PREPEND: Json = {"type": "Prepend", "prepend": "\u2581"}
AT_SPACES: Json = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
ALL_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}
SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "accepted"),
    [
        ({"type": "Sequence", "normalizers": [PREPEND, SPACES]}, None, True),
        (SPACES, None, True),
        (SPACES, AT_SPACES, True),
        (None, AT_SPACES, False),
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
def test_definitions_give_the_same_tokens_or_are_refused(
    normalizer: Json | None, pre_tokenizer: Json | None, accepted: bool
) -> None:
    tokens = [{"content": "<q>"}, {"content": "<q>a"}, {"content": "\n\n"}, {"content": "  "}]
    tokens += [] if normalizer else [{"content": "[INST]", "normalized": True}]
    changes = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
    text = json.dumps(added(definition(), *tokens) | changes)
    reason, encode = encoders(text.encode(), "tokenizers")
    assert (reason == "") == accepted
    if accepted:
        pieces = ["<q>", "<q", ">a", "a", " ", "\u2581", "\n", "[INST]", "the"]
        texts = random_texts(3000, seed=7) + random_texts(2000, seed=8, atoms=pieces)
        assert encode(texts) == reference(text)(texts)


def test_a_tab_can_stand_in_place_of_its_byte() -> None:
    """As in Gemma: the character has a token, so its byte needs none."""
    changed = definition() | {"normalizer": SPACES}
    vocab = changed["model"]["vocab"]
    vocab["\t"] = vocab.pop("<0x09>")
    text = json.dumps(changed)
    reason, encode = encoders(text.encode(), "tokenizers")
    assert not reason
    texts = random_texts(
        2000, seed=9, atoms=["\t", "\t\t", " ", "\n", "a", "\0", "<0x09>", "\u6f22"]
    )
    assert encode(texts) == reference(text)(texts)


def definition() -> Json:
    """A tokenizer.json with the vocabulary of a SentencePiece model, and merges in its order."""
    spec = parser.read(sentencepiece_model())
    ids = {piece.text: number for number, piece in enumerate(spec.pieces)}
    cuts = ((text[:cut], text[cut:]) for text in ids for cut in range(1, len(text)))
    merges = [(left, right) for left, right in cuts if left in ids and right in ids]
    model = tokenizers.models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return json.loads(tokenizers.Tokenizer(model).to_str())


def reference(text: str) -> Encode:
    tokenizer = tokenizers.Tokenizer.from_str(text)
    return lambda texts: [
        e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def fast(model: bytes) -> Encode:
    reason, encode = encoders(model, "sentencepiece")
    assert reason == ""
    return encode


def refusal(model: bytes) -> str:
    return encoders(model, "sentencepiece")[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ignore_merges": True}, "ignore_merges"),
        ({"byte_fallback": False}, "a byte is not"),
        ({"merges": [("<0x41>", "a")]}, "it merges bytes"),
        ({"vocab": {**ALL_BYTES, "<0x00>a": 257}, "merges": [("<0x00>", "a")]}, "merges bytes"),
        ({"vocab": {**ALL_BYTES}, "merges": []}, "lacks U+2581"),
    ],
)
def test_models_of_definitions_that_are_not_exact_are_refused(change: Json, reason: str) -> None:
    changed = definition() | {"normalizer": SPACES}
    changed["model"] |= change
    changed["model"]["vocab"]["<0x41>a"] = 5000
    assert reason in encoders(json.dumps(changed).encode(), "tokenizers")[0]


def test_added_tokens_in_normalized_text_are_refused() -> None:
    text = added(definition(), {"content": "<q>", "normalized": True}) | {"normalizer": SPACES}
    assert "normalized text" in encoders(json.dumps(text).encode(), "tokenizers")[0]


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
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    runs = ["".join(runs) for size in range(1, 7) for runs in product("ab \u2581", repeat=size)]
    texts = [*random_texts(5000, seed=8), *runs, *(" " * n + "a" for n in range(80))]
    assert processor.encode(texts, num_threads=1) == fast(model)(texts)


@pytest.mark.parametrize("has_prefix", [False, True])
def test_user_defined_pieces_give_the_same_tokens(has_prefix: bool, times: int) -> None:
    """As in Mistral's models from v3 on. The prefix also goes before such a piece."""
    symbols = ["[INST]", "[INST]a", "<q>", "the", "\n\n", "q", "\u00e9"]
    model = sentencepiece_model(user_defined_symbols=symbols, add_dummy_prefix=has_prefix)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    atoms = [*symbols, "[INST", "]", "a", "th", "e", " ", "\u2581", "\n", "<0x0A>", "", "\u6f22"]
    texts = [*random_texts(2000 * times, seed=3, atoms=atoms), *random_texts(1000, seed=4), ""]
    encode = fast(model)
    assert processor.encode(texts, num_threads=1) == encode(texts)
    assert processor.encode(texts, num_threads=1) == encode(texts)  # from the cache


@pytest.mark.grid
def test_every_code_point_gives_the_same_tokens() -> None:
    model = sentencepiece_model()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    encode = fast(model)
    characters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(f"a{c}b {c} {c}{c}" for c in characters[start : start + 256])
        for start in range(0, len(characters), 256)
    ]
    assert processor.encode(texts, num_threads=2) == encode(texts)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "unigram"}, "it is a unigram model"),
        ({"byte_fallback": False}, "it has no byte_fallback"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalizes text"),
        ({"remove_extra_whitespaces": True}, "it removes extra whitespace"),
        ({"treat_whitespace_as_suffix": True}, "it marks spaces in another way"),
        ({"user_defined_symbols": ["<q> a"]}, "a user-defined piece has a space"),
        ({"user_defined_symbols": ["a\u2581"]}, "a user-defined piece has a space"),
    ],
    ids=str,
)
def test_models_that_are_not_exact_are_refused(changes: Json, reason: str) -> None:
    assert refusal(sentencepiece_model(**changes)) == reason


def test_pieces_that_are_not_exact_are_refused() -> None:
    def piece(text: str, score: float, kind: int = 1) -> bytes:
        fields = b"\x0a" + bytes([len(text.encode())]) + text.encode()
        fields += b"\x15" + np.float32(score).tobytes() + bytes([3 << 3, kind])
        return b"\x0a" + bytes([len(fields)]) + fields

    model = sentencepiece_model()
    spaces = b"".join(piece("\u2581" * size, -1e9) for size in (20, 21, 22))  # like Llama-2
    assert refusal(model + spaces) == ""
    texts = [" " * size + end for size in range(100) for end in ("", "a")]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model + spaces)
    assert processor.encode(texts, num_threads=1) == fast(model + spaces)(texts)
    equal_scores = piece("qzqz", -7e8) + piece("zqzq", -7e8)
    assert refusal(model + equal_scores) == "two of its pieces have the same score"
    unknown = piece("q\u0378", -7e8)
    assert refusal(model + unknown) == "a character of its pieces is no piece"
    known = {each.text for each in parser.read(model).pieces}
    spelled = piece("</", -7e8) + piece("s>", -8e8)  # together a control piece, never in text
    spelled += b"".join(piece(sign, -9e8) for sign in "</s>" if sign not in known)
    texts = ["</s>", "a</s></s>b", "</", "s>"]
    processor = sentencepiece.SentencePieceProcessor(model_proto=model + spelled)
    assert processor.encode(texts, num_threads=1) == fast(model + spelled)(texts)
