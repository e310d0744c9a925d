"""A model that a server serves: its name, tokenizer and engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokamake.data.tokenizers import Tokenizer
from tokamake.inference.engine import InferenceEngine, TokenScore
from tokamake.inference.text_stream import token_texts
from tokamake.serve.request_body import RequestError

_CONTEXT = 8
"""Tokens before a token that decide about its text."""


@dataclass(frozen=True)
class ServedModel:
    """A model of a server."""

    name: str
    tokenizer: Tokenizer
    engine: InferenceEngine
    end_tokens: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))
    """When it was loaded, in seconds since 1970."""

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens. The last new token needs no place."""
        return self.engine.capacity + 1

    def encode(self, text: str, *, field: str, adds_bos: bool = False) -> list[int]:
        """Tokens of a prompt, with BOS if wanted; an empty one is the end-of-document token."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError("holds half a surrogate pair; remove it", field=field) from None
        if size > self.engine.capacity * self.token_bytes:
            raise RequestError(
                f"{size} bytes, but the model sees only {self.engine.capacity} tokens of at most "
                f"{self.token_bytes} bytes; shorten it",
                field=field,
                code="context_length_exceeded",
            )
        tokenizer = self.tokenizer
        tokens = tokenizer.encode_prompt(text) if adds_bos else tokenizer.encode_batch([text])[0]
        return self.check(tokens or [tokenizer.eod], field=field)

    def check(self, tokens: list[int], *, field: str) -> list[int]:
        """Return tokens of a prompt."""
        if not tokens:
            raise RequestError("holds no token; give at least one", field=field)
        self.check_tokens(tokens, field=field)
        if len(tokens) > self.engine.capacity:
            raise RequestError(
                f"{len(tokens)} tokens, but the model sees only {self.engine.capacity}; shorten it",
                field=field,
                code="context_length_exceeded",
            )
        return tokens

    def check_tokens(self, tokens: Sequence[int], *, field: str) -> None:
        size = self.tokenizer.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < size]:
            message = f"token {wrong[0]}: not in the vocabulary; give 0 to {size - 1}"
            raise RequestError(message, field=field)

    def decoder(self, *, skips_special: bool) -> Callable[[list[int]], str]:
        """Function that makes text of tokens, without special ones if wanted."""
        decode, special = self.tokenizer.decode, self.tokenizer.special_tokens
        if not skips_special:
            return decode
        return lambda tokens: decode([token for token in tokens if token not in special])

    @cached_property
    def token_bytes(self) -> int:
        """Most bytes of the text of a token."""
        tokens = range(self.tokenizer.vocab_size)
        return max(len(self.tokenizer.decode([token]).encode()) for token in tokens) + 1

    def check_length(self, prompt: Sequence[int], num_new: int, *, field: str) -> None:
        if (room := self.max_length - len(prompt)) < num_new:
            raise RequestError(
                f"{num_new}: too many after a prompt of {len(prompt)} tokens; give at most {room}",
                field=field,
                code="context_length_exceeded",
            )

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds."""
        return token_texts(self.tokenizer.decode, tokens)

    def prompt_texts(self, prompt: Sequence[int]) -> list[str]:
        """The text of each token of a prompt; a first token that encoding adds has none."""
        num_added = int(self.tokenizer.adds_bos and prompt[0] == self.tokenizer.bos)
        return [""] * num_added + self.token_texts(prompt[num_added:])

    def alternatives(
        self, score: TokenScore, token: int, *, before: Sequence[int]
    ) -> list[tuple[str, float]]:
        """Texts and log-probabilities of the most likely tokens, and of the chosen one."""
        pairs = [*score.alternatives]
        if token not in (alternative for alternative, _ in pairs):
            pairs.append((token, score.log_probability))
        context = [*before[-_CONTEXT:]]
        known = len(self.tokenizer.decode(context))
        return [
            (self.tokenizer.decode([*context, alternative])[known:], log_probability)
            for alternative, log_probability in pairs
        ]

    def describe(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "tokamake",
            "max_model_len": self.max_length,
            "has_chat_template": bool(self.tokenizer.chat_template),
        }
