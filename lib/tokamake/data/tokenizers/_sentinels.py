"""Tokens of T5 that are appended to a tokenizer: [BOS], [EOS] and sentinels.

All other tokens keep their ids, so datasets of the tokenizer stay valid: the extended one names it
by its fingerprint. Without the appended tokens, its definition equals the tokenizer's.
"""

import json
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.data.tokenizers import BASE_KEY, Tokenizer, settings
from tokamake.data.tokenizers.trained import wordpiece
from tokamake.errors import UserError

SENTINEL = "<extra_id_{}>"
DECODER_TOKENS = ("[BOS]", "[EOS]")
"""First and last token of a decoder."""
_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def appended_texts(num_sentinels: int) -> list[str]:
    """Texts of the appended tokens, in the order of their ids."""
    return [*DECODER_TOKENS, *(SENTINEL.format(number) for number in range(num_sentinels))]


def decoder_tokens(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Ids of [BOS] and [EOS], which begin and end a decoder's tokens; None if there are none."""
    if tokenizer.package != "tokenizers":
        return None
    added = json.loads(tokenizer.definition())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    bos, eos = map(ids.get, DECODER_TOKENS)
    return None if bos is None or eos is None else (bos, eos)


def extended_definition(tokenizer: Tokenizer, num_sentinels: int, *, path: Path) -> str:
    """Text of the tokenizer.json with [BOS], [EOS] and sentinels.

    Ids without a token are refused: they would be given to new tokens.
    """
    import tokenizers

    if tokenizer.package != "tokenizers":
        raise UserError(
            f"tokenizer {path}: only a tokenizer.json or vocab.txt can be extended; give the "
            "tokenizer of a BERT"
        )
    definition = json.loads(tokenizer.definition())
    first, texts = tokenizer.vocab_size, appended_texts(num_sentinels)
    known = tokenizers.Tokenizer.from_str(json.dumps(definition)).get_vocab()
    if present := [text for text in texts if text in known]:
        raise UserError(
            f"tokenizer {path}: has {present[0]} already; use it as it is, without sentinels"
        )
    for token, text in enumerate(texts, first):
        definition["added_tokens"].append({"id": token, "content": text, **_ADDED, "special": True})
    text = json.dumps(definition, ensure_ascii=False)
    extended = tokenizers.Tokenizer.from_str(text).get_vocab()
    expected = {**known, **{text: token for token, text in enumerate(texts, first)}}
    if extended != expected:
        raise UserError(
            f"tokenizer {path}: its vocabulary of {first:,} ids has gaps, which new tokens would "
            "fill; give one without gaps"
        )
    return text


def write_extended(
    tokenizer: Tokenizer, num_sentinels: int, *, paths: list[Path], output: Path
) -> None:
    """Write tokenizer.json and tokenizer_config.json of an extended tokenizer."""
    definition = extended_definition(tokenizer, num_sentinels, path=paths[0])
    config = _config(paths, {*json.loads(definition)["model"]["vocab"]})
    config["additional_special_tokens"] = [
        *config.get("additional_special_tokens", []),
        *appended_texts(num_sentinels),
    ]
    config[BASE_KEY] = tokenizer.fingerprint
    with files.atomic_folder(output) as folder:
        files.write_text(folder / "tokenizer.json", definition)
        files.write_json(folder / "tokenizer_config.json", config)


def _config(paths: list[Path], vocabulary: set[str]) -> dict[str, Any]:
    """Content of the config files of a tokenizer; for a vocab.txt alone, BERT's special tokens."""
    config = settings(paths)
    config.pop("added_tokens_decoder", None)  # ids of tokens, which tokenizer.json has
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if not config.keys() & {"sep_token", "eos_token"}:
        named = wordpiece.SPECIAL_TOKENS
        config |= {key: text for key, text in named.items() if text in vocabulary}
    return config
