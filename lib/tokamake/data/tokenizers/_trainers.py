"""Training of tokenizers: what each kind is made of. The same texts give the same bytes.

Texts come from `train_tokenizer`; a tokenizer that transformers can load goes to a folder. Trainers
of `tokenizers` go through words in an order that changes from run to run, which only byte-level BPE
does not mind; see the words at the other kinds.
"""

import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError
from tokamake.files import atomic_folder, write_json

if TYPE_CHECKING:
    import tokenizers

EOD_TOKEN = "<|endoftext|>"

_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

_NAMED: dict[str, dict[str, str]] = {
    "bpe": {"bos_token": EOD_TOKEN, "eos_token": EOD_TOKEN},
    "unigram": {"bos_token": EOD_TOKEN, "eos_token": EOD_TOKEN},
    "wordpiece": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
    },
}

_PLAIN_UNIGRAM: dict[str, Any] = {
    "model_type": "unigram",
    "input_format": "tsv",
    "num_threads": 8,  # sums depend on it, so it is the same everywhere
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_by_whitespace": False,
    "split_by_unicode_script": False,
    "split_by_number": False,
    "max_sentence_length": 1_000_000_000,
    "unk_id": 0,
    "bos_id": -1,
    "eos_id": -1,
    "pad_id": -1,
    "minloglevel": 2,
}

MINIMUM = {"bpe": 257, "unigram": 257, "wordpiece": 261}
"""Fewest entries of each kind: all bytes (for wordpiece, some characters) and special tokens."""


Texts = Callable[[], Iterator[str]]
"""Begins to read the texts, each time from the first."""


def train(
    kind: str, texts: Texts, vocab_size: int, *, special_tokens: Sequence[str] = ()
) -> "tokenizers.Tokenizer":
    """Train a tokenizer.

    Args:
        kind: bpe, wordpiece or unigram.
        texts: the texts, gone through once or twice.
        vocab_size: entries, at least MINIMUM[kind] and the special tokens.
        special_tokens: more of them, as `check_special_tokens` wants them.

    Raises:
        UserError: the texts are too little for so many entries.
    """
    makers = {"bpe": _bpe, "wordpiece": _wordpiece, "unigram": _unigram}
    trained = makers[kind](texts, vocab_size, [*special_tokens])
    if trained.get_vocab_size() < vocab_size:
        raise _too_little(vocab_size, str(trained.get_vocab_size()))
    return trained


def _too_little(vocab_size: int, entries: str) -> UserError:
    return UserError(
        f"tokenizer.vocab_size: {vocab_size}: the corpora give only {entries} entries; lower it or "
        "add text"
    )


def check_special_tokens(kind: str, special_tokens: Sequence[str]) -> None:
    """Refuse special tokens that a tokenizer could not tell from others.

    Raises:
        UserError: one is empty, begins or ends with a space, comes twice, or is of the kind's own.
    """
    known = set(_BERT if kind == "wordpiece" else [EOD_TOKEN])
    for token in special_tokens:
        if token != token.strip() or not token:
            raise UserError(f"special_tokens: {token!r}: give text without spaces around it")
        if token in known:
            raise UserError(f"special_tokens: {token!r}: is one already; leave it out")
        known.add(token)


def write(
    kind: str,
    trained: "tokenizers.Tokenizer",
    folder: Path,
    *,
    special_tokens: Sequence[str] = (),
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which names the special tokens."""
    with atomic_folder(folder) as made:
        trained.save(str(made / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **_NAMED[kind]}
        if special_tokens:
            config["additional_special_tokens"] = [*special_tokens]
        write_json(made / "tokenizer_config.json", config)


def _bpe(texts: Texts, vocab_size: int, special_tokens: list[str]) -> "tokenizers.Tokenizer":
    from tokenizers import models, pre_tokenizers, trainers

    trained = _over_bytes(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    trained.train_from_iterator(texts(), trainer)
    return trained


def _over_bytes(model: Any) -> "tokenizers.Tokenizer":
    """A tokenizer of text as bytes, split into words as GPT-2 does."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _wordpiece(texts: Texts, vocab_size: int, special_tokens: list[str]) -> "tokenizers.Tokenizer":
    """BERT's WordPiece.

    Entries for single characters are given to the trainer: it would choose among equally frequent
    ones, and number those inside words, in the order of words.
    """
    from tokenizers import models, trainers

    # A character may have two entries, at the beginning and inside of words.
    special = [*_BERT, *special_tokens]
    characters = _frequent_characters(texts(), min(1000, (vocab_size - len(special)) // 4))
    inner = ["##" + character for character in characters if _may_continue(character)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=sys.stderr.isatty(),
    )
    trained = _bert(models.WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(texts(), trainer)
    vocabulary = trained.get_vocab()
    clean = _bert(
        models.WordPiece(vocabulary, unk_token="[UNK]")
    )  # in which `inner` is not special
    clean.add_special_tokens(special)
    return clean


def _bert(model: Any) -> "tokenizers.Tokenizer":
    """A tokenizer of lower-cased text without accents, split at spaces and punctuation."""
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    ends = (("[SEP]", _BERT.index("[SEP]")), ("[CLS]", _BERT.index("[CLS]")))
    made.post_processor = processors.BertProcessing(*ends)
    return made


def _frequent_characters(texts: Iterator[str], limit: int) -> list[str]:
    """The most frequent characters of normalized text; of equally frequent ones the lower."""
    from tokenizers import normalizers

    written: Counter[str] = Counter()
    for text in texts:
        written.update(text)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts: Counter[str] = Counter()
    for character, count in written.items():
        for normal in normalizer.normalize_str(character).strip():
            counts[normal] += count
    return sorted(sorted(counts, key=lambda c: (-counts[c], c))[:limit])


def _may_continue(character: str) -> bool:
    """Whether a character can stand inside a word."""
    from tokenizers import normalizers, pre_tokenizers

    text = normalizers.BertNormalizer(lowercase=True).normalize_str(f"a{character}a")
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)) == 1


def _unigram(texts: Texts, vocab_size: int, special_tokens: list[str]) -> "tokenizers.Tokenizer":
    """Unigram over bytes, trained by sentencepiece.

    The trainer of `tokenizers` adds up probabilities in the order of words.
    """
    from tokenizers import models, pre_tokenizers

    words: Counter[str] = Counter(dict.fromkeys(pre_tokenizers.ByteLevel.alphabet(), 1))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    for text in texts():
        words.update(word for word, _ in split(text))
    pieces = _unigram_pieces(words, vocab_size, len(special_tokens))
    special = [EOD_TOKEN, *special_tokens]
    entries = [*((token, 0.0) for token in special), *pieces]
    trained = _over_bytes(models.Unigram(entries, None, False))
    trained.add_special_tokens(special)
    return trained


def _unigram_pieces(words: Counter[str], vocab_size: int, reserved: int) -> list[tuple[str, float]]:
    """Train on words and their counts; pieces and their log-probabilities, without the unknown.

    Of the entries of the vocabulary, the unknown and `reserved` others are no pieces.
    """
    import sentencepiece

    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".tsv") as table:
        table.writelines(f"{word}\t{count}\n" for word, count in sorted(words.items()))
        table.flush()
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=table.name,
                model_writer=model,
                vocab_size=vocab_size - reserved,
                **_PLAIN_UNIGRAM,
            )
        except RuntimeError as error:
            if "<= " not in (what := str(error)):
                raise
            most = int(what.rpartition("<= ")[2].rstrip(".")) + reserved
            raise _too_little(vocab_size, str(most)) from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    numbers = range(1, processor.get_piece_size())
    return [(processor.id_to_piece(n), processor.get_score(n)) for n in numbers]
