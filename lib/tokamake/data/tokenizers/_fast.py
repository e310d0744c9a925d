"""Tokenizers of the package `tokenizers`, with the tokens that config files add.

Tokens are added as transformers 5 adds them, or refused. Tokens with stated ids come first
(added_tokens_decoder of tokenizer_config.json, or else added_tokens.json), then special tokens with
a name, then further ones. Each new token gets the next free id.
tests/data/tokenizers/test_fast.py compares with transformers.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake.data.tokenizers import (
    ADDED_TOKENS,
    CONFIGS,
    Tokenizer,
    failure,
    settings,
    special_token,
    token_text,
)
from tokamake.errors import UserError
from tokamake.files import read_json

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import AddedToken

MAX_ADDED_TOKENS = 100_000
"""More take minutes to load. Models have up to a few thousand."""
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class Merges(NamedTuple):
    """Merges of a tokenizer.json that `wrap` gets without them."""

    text: bytes
    """JSON of the merges."""
    highest_id: int
    """Highest id of the vocabulary."""
    load: "Callable[[], tokenizers.Tokenizer]"
    """Load the whole tokenizer.json."""


def wrap(
    fast: "tokenizers.Tokenizer",
    paths: list[Path],
    *,
    defaults: Mapping[str, str] = {},
    pieces: Iterable["AddedToken"] = (),
    has_text: bool = True,
    merges: Merges | None = None,
) -> Tokenizer:
    """Add the tokens of the config files to a tokenizer, and turn it into a `Tokenizer`.

    With `merges`, `fast` has none. They are loaded when a text is encoded for the first time.
    """
    end, beginning = _prepare(fast, paths, defaults=defaults, pieces=pieces)
    for name in _remove_sampling(fast):
        print(
            f"tokenizer {paths[0]}: its {name} is turned off: data must not be random",
            file=sys.stderr,
        )
    added = fast.get_added_tokens_decoder()
    ids = fast.get_vocab().values() if merges is None else (merges.highest_id, *added)
    vocab_size = max(ids) + 1
    eod, bos = (fast.token_to_id(token) if token else None for token in (end, beginning))
    assert eod is not None  # `add_tokens` has checked it
    adds_bos = settings(paths).get("add_bos_token")
    if adds_bos is None:
        adds_bos = bool(beginning) and fast.encode("").ids[:1] == [bos]

    @cache
    def complete() -> "tokenizers.Tokenizer":
        if merges is None:
            return fast
        try:
            whole = merges.load()
        except BaseException as error:  # as below
            raise UserError(
                f"tokenizer {paths[0]}: cannot be loaded ({failure(error)}); fetch it again"
            ) from None
        _prepare(whole, paths, defaults=defaults, pieces=pieces)
        _remove_sampling(whole)
        whole.encode_special_tokens = fast.encode_special_tokens
        return whole

    def encode_batch(texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        whole = complete()
        try:
            return [e.ids for e in whole.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:  # the package raises bare Exception, or panics
            reason = failure(error)
            if not has_text:
                reason = f"write token ids below {vocab_size:,}, separated by spaces"
            raise UserError(
                f"tokenizer {paths[0]}: cannot encode a text ({reason}); remove the text, or "
                "give another tokenizer"
            ) from None

    return Tokenizer(
        vocab_size=vocab_size,
        has_text=has_text,
        eod=eod,
        bos=bos,
        adds_bos=adds_bos,
        special_tokens=frozenset(number for number, token in added.items() if token.special),
        encode_batch=encode_batch,
        decode=lambda ids: fast.decode(ids, skip_special_tokens=False),
        package="tokenizers",
        definition=cache(lambda: _definition(fast, merges)),
        read_special_tokens_as_text=lambda: _read_special_tokens_as_text(fast, complete),
    )


def _read_special_tokens_as_text(fast: "tokenizers.Tokenizer", complete: Any) -> None:
    """Do so from now on, and once merges are loaded; `complete` is cached."""
    fast.encode_special_tokens = True
    if complete.cache_info().currsize:
        complete().encode_special_tokens = True


def _prepare(
    fast: "tokenizers.Tokenizer",
    paths: list[Path],
    *,
    defaults: Mapping[str, str],
    pieces: Iterable["AddedToken"],
) -> tuple[str, str]:
    """Add tokens as `add_tokens`. Encode whole texts.

    A tokenizer.json may set truncation and padding. These are for model inputs, not for data.
    """
    ends = add_tokens(fast, paths, defaults=defaults, pieces=pieces)
    fast.no_truncation()
    fast.no_padding()
    return ends


def _remove_sampling(fast: "tokenizers.Tokenizer") -> list[str]:
    """Turn off BPE dropout and the sampling of Unigram, which give other tokens each time.

    Returns their names if they were on.
    """
    names = [name for name in ("dropout", "alpha") if getattr(fast.model, name, None)]
    for name in names:
        setattr(fast.model, name, None)
    return names


def _definition(fast: "tokenizers.Tokenizer", merges: Merges | None) -> bytes:
    """Text of tokenizer.json. It lacks special tokens that are read as text.

    Not the file's text: `tokenizers` may renumber added tokens.
    """
    text = fast.to_str().encode()
    if merges and text.endswith(b"[]}}"):  # `to_str` ends with the merges of a BPE model
        text = text.removesuffix(b"[]}}") + merges.text + b"}}"
    if not fast.encode_special_tokens:
        return text
    definition = json.loads(text)
    definition["added_tokens"] = [t for t in definition["added_tokens"] if not t["special"]]
    return json.dumps(definition).encode()


def add_tokens(
    fast: "tokenizers.Tokenizer",
    paths: list[Path],
    *,
    defaults: Mapping[str, str],
    pieces: Iterable["AddedToken"] = (),
) -> tuple[str, str]:
    """Add the tokens of the config files; return the texts of eod, and of bos or "".

    Args:
        defaults: special tokens by name that count if the files name no other, and if the
            vocabulary has them (transformers would add them to any vocabulary).
        pieces: further tokens of the vocabulary to find in text, if the files list no added tokens.
    """
    stated, config = settings(paths), settings([path for path in paths if path.name != CONFIGS[1]])
    used = config if "added_tokens_decoder" in config else stated
    named = {**dict.fromkeys(_NAMES), **defaults, **used}
    named = {key: named[key] for key in named if key.endswith("_token") and token_text(named[key])}
    extra = used.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    if isinstance(extra, dict):
        named, extra = named | extra, ()
    special = {*map(token_text, [*(used.get(key) for key in _NAMES), *extra])}
    _add_stated(fast, paths, special=special, named={*map(token_text, named.values())})

    ends = ("eos_token", "sep_token"), ("bos_token", "cls_token")
    end = special_token(named, *ends[0]) or special_token(stated, *ends[0])
    for key in defaults:
        if named.get(key) == defaults[key] and fast.token_to_id(defaults[key]) is None:
            del named[key]
    beginning = special_token(named, *ends[1]) or special_token(stated, *ends[1])
    if not end:
        raise UserError(
            f"tokenizer {paths[0]}: no eos_token in {' or '.join(CONFIGS)} beside it; "
            "add the file that came with the tokenizer"
        )
    for role, token in (("end", end), ("beginning", beginning)):
        if token and fast.token_to_id(token) is None:
            raise UserError(
                f'tokenizer {paths[0]}: its {role} token "{token}" is not in its vocabulary; '
                "fetch all of its files again"
            )

    extra = [*(extra or pieces or used.get("additional_special_tokens") or ())]
    check_number(paths[0], len(extra))
    tokens: dict[str, AddedToken] = {}
    for added in map(_token, [*named.values(), *extra]):
        tokens.setdefault(added.content, added)
    for text in map(token_text, named.values()):
        tokens[text].special = True
    known = _known(fast)
    fast.add_tokens([token for text, token in tokens.items() if text not in known])
    return end, beginning


def _add_stated(
    fast: "tokenizers.Tokenizer", paths: list[Path], *, special: set[str], named: set[str]
) -> None:
    """Add the tokens whose ids the files state; `special` are special, `named` have a name."""
    decoder = settings(paths).get("added_tokens_decoder")
    if decoder is not None:
        tokens = {
            int(number): _token({"special": False, **fields}) for number, fields in decoder.items()
        }
        ids = [(token.content, number) for number, token in tokens.items()]
    else:
        ids = _added_tokens(paths)
        known = _known(fast)
        tokens = {
            number: _token({"content": text, "special": text in special})
            for text, number in ids
            if text not in known
        }
    check_number(paths[0], len(ids))
    for token in tokens.values():
        token.special = token.special or token.content in named
    fast.add_tokens([tokens[number] for number in sorted(tokens)])
    for text, number in ids:
        if (found := fast.token_to_id(text)) != number:
            raise UserError(
                f"tokenizer {paths[0]}: the files beside it state id {number} for the added token "
                f'"{text}", but it would get {found}; ids of added tokens must follow the '
                "vocabulary without gaps: fetch all of its files again"
            )


def _added_tokens(paths: list[Path]) -> list[tuple[str, int]]:
    files = [read_json(path, "fetch it again") for path in paths if path.name == ADDED_TOKENS]
    return [pair for file in files for pair in file.items()]


def stated_texts(paths: list[Path]) -> list[str]:
    """Texts of all tokens that the config files name or add."""
    config = settings(paths)
    extra = [config.get(key) or () for key in ("extra_special_tokens", "additional_special_tokens")]
    values = [config.get(key) for key in _NAMES]
    for group in (config.get("added_tokens_decoder") or (), *extra):
        values += group.values() if isinstance(group, dict) else group
    return [text for text, _ in _added_tokens(paths)] + [*filter(None, map(token_text, values))]


def check_number(path: Path, number: int) -> None:
    """Raise UserError if a tokenizer has too many added tokens to load."""
    if number > MAX_ADDED_TOKENS:
        raise UserError(
            f"tokenizer {path}: {number:,} added tokens, more than {MAX_ADDED_TOKENS:,}; "
            "make them part of its vocabulary"
        )


def _known(fast: "tokenizers.Tokenizer") -> set[str]:
    return {token.content for token in fast.get_added_tokens_decoder().values()}


def _token(value: "str | Mapping[str, Any] | AddedToken") -> "AddedToken":
    """A special token from its text or its flags."""
    from tokenizers import AddedToken

    if isinstance(value, AddedToken):
        return value
    fields: dict[str, Any] = {"special": True}
    fields |= {"content": value} if isinstance(value, str) else value
    return AddedToken(**{key: fields[key] for key in _FLAGS if key in fields})
