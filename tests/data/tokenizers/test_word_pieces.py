"""WordPiece in lib/csrc gives the tokens of the `tokenizers` package."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.support.grids import params
from tests.support.tokenizer_texts import ASSIGNED_POINTS, Encode, Json, random_texts, rows
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.data.tokenizers._fast import wrap
from tokamake.data.tokenizers._fast_encoder import FastEncoder, refusal

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = (
    "abcdeéÉß\u0301\u0345ΣςİДй日本がｶﾞ.,!'[]\u00ad\u200d\u00a0\u3000\ufffd\x00\x1f\t\n\r   $＋،각"
    "\u1b44\u302e\u0323"
)
KINDS: dict[str, dict[str, bool]] = {
    "uncased": {},
    "cased": {"do_lower_case": False},
    "stripped": {"do_lower_case": False, "strip_accents": True},
    "accents": {"strip_accents": False},
    "Chinese in words": {"tokenize_chinese_chars": False},
}


def write_vocabulary(folder: Path, **settings: Any) -> Path:
    """Write a BERT vocabulary with unusual letters, as words and inside words."""
    folder.mkdir(exist_ok=True)
    letters = [*LETTERS, *"ieиσᄀ\u1161\u11a8", *map(str, range(10))]
    words = [*letters, *(f"##{letter}" for letter in letters), "ab", "##ab", "a.", "sep", "mask"]
    entries = (word for word in [*SPECIAL, *words] if not any(map(str.isspace, word)))
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(entries)), encoding="utf-8")
    config = {"do_lower_case": True, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=KINDS)
def bert(tmp_path: Path, request: pytest.FixtureRequest) -> Tokenizer:
    return open_tokenizer(write_vocabulary(tmp_path / "bert", **KINDS[request.param]))


def fast(tokenizer: Tokenizer) -> Encode:
    assert refusal(tokenizer) == ""
    encoder = FastEncoder(tokenizer)
    return lambda texts: rows(*encoder.encode(texts))


def test_random_texts_give_the_same_tokens(bert: Tokenizer) -> None:
    parts = [*LETTERS, "ab", "[SEP]", " [MASK] ", "[sep]", "[SE", "x" * 99, "ab" * 60, "e" * 101]
    rng = random.Random(3)
    texts = ["".join(rng.choices(parts, k=rng.choice([0, 1, 5, 90]))) for _ in range(300)]
    texts += [*random_texts(1000, seed=4), "a" * 9000, " " * 9000, "a " * 9000]
    encode = fast(bert)
    assert encode(texts) == bert.encode_batch(texts)
    assert encode(texts) == bert.encode_batch(texts)  # from the cache


@pytest.mark.grid
@pytest.mark.parametrize("bert", params(KINDS, ["uncased"]), indirect=True)
def test_every_code_point_gives_the_same_tokens(bert: Tokenizer) -> None:
    points = [*map(chr, ASSIGNED_POINTS)]
    around = [f"a{c}b.{c}\u0301 {c}[SEP] 日{c}\u302e{c}\u1b44" for c in points]
    texts = ["".join(around[i : i + 300]) for i in range(0, len(around), 300)]
    assert fast(bert)(texts) == bert.encode_batch(texts)


def changed(change: Callable[[Json], object], folder: Path) -> Tokenizer:
    package = tokenizers.BertWordPieceTokenizer(str(write_vocabulary(folder) / "vocab.txt"))
    definition = json.loads(package.to_str())
    change(definition)
    loaded = tokenizers.Tokenizer.from_str(json.dumps(definition))
    return wrap(loaded, [folder / "tokenizer.json"], defaults={"sep_token": "[SEP]"})


def add_tokens(*tokens: Json) -> Callable[[Json], object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    new = [{"id": 200 + n, "special": True} | flags | token for n, token in enumerate(tokens)]
    return lambda definition: definition["added_tokens"].extend(new)


def normalizer(*steps: str) -> Callable[[Json], object]:
    sequence = {"type": "Sequence", "normalizers": [{"type": step} for step in steps]}
    return lambda definition: definition.update(normalizer=sequence)


@pytest.mark.parametrize(
    "change",
    [
        add_tokens(
            {"content": "[NEW]", "single_word": True}, {"content": "é", "single_word": True}
        ),
        add_tokens({"content": "[NEW]", "normalized": True}, {"content": "É", "normalized": True}),
        add_tokens({"content": "[NEW]", "lstrip": True}, {"content": "a b", "rstrip": True}),
        normalizer(),
        normalizer("NFD", "Lowercase", "StripAccents"),
        normalizer("Lowercase", "NFKD"),
        lambda definition: definition["model"].update(continuing_subword_prefix=""),
        lambda definition: definition["model"].update(max_input_chars_per_word=3),
    ],
)
def test_changed_definitions_give_the_same_tokens(
    tmp_path: Path, change: Callable[[Json], object]
) -> None:
    tokenizer = changed(change, tmp_path / "bert")
    parts = [*LETTERS, "[NEW]", "[NEW]", "[new]", "é", "É", "e\u0301", "a b", "ab", "_", "1", " "]
    texts = random_texts(3000, seed=5, atoms=parts)
    assert fast(tokenizer)(texts) == tokenizer.encode_batch(texts)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda definition: definition.update(normalizer={"type": "NFC"}), "several characters"),
        (lambda definition: definition.update(pre_tokenizer={"type": "Whitespace"}), "not BERT's"),
        (lambda definition: definition.update(pre_tokenizer=None), "not BERT's"),
        (lambda definition: definition["model"].update(unk_token="none"), "for unknown words"),
    ],
)
def test_other_tokenizers_are_refused(
    tmp_path: Path, change: Callable[[Json], object], reason: str
) -> None:
    assert reason in refusal(changed(change, tmp_path / "bert"))
