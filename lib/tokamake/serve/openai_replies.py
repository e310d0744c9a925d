"""Replies in the format of OpenAI's API: whole, or in parts as tokens come."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, ClassVar

from tokamake.inference.text_stream import TextStream
from tokamake.serve.engine_loop import Continuation
from tokamake.serve.openai_requests import ChatRequest, CompletionRequest
from tokamake.serve.served_model import ServedModel


class Choice:
    """One continuation of a reply.

    Attributes:
        is_begun: whether a part of it was sent.
        texts: gives the text that each token adds.
        finish: why it ended, as of the latest news; None as long as it continues.
        offset: characters of the tokens that were sent.
    """

    def __init__(self, index: int, continuation: Continuation, *, texts: TextStream) -> None:
        self.index, self.continuation, self.texts = index, continuation, texts
        self.is_begun, self.offset = False, 0
        self.finish: str | None = None
        self._num_characters = self._num_tokens = 0

    @property
    def tokens(self) -> list[int]:
        """New tokens, with the end token."""
        generation = self.continuation.generation
        end = [] if generation.end_token is None else [generation.end_token]
        return [*generation.tokens, *end]

    def news(self) -> tuple[str, range]:
        """Text and tokens since the last call. Tokens without text wait for text or the end."""
        num_characters, num_tokens = self.continuation.published
        text = self.continuation.text.text[self._num_characters : num_characters]
        tokens = range(self._num_tokens, self._num_tokens)
        if self.continuation.is_ended:
            is_stopped = self.continuation.generation.finish in ("eod", "stop")
            self.finish = "stop" if is_stopped else "length"
        if text or self.finish:
            tokens = range(self._num_tokens, num_tokens)
        self._num_characters += len(text)
        self._num_tokens = tokens.stop
        return text, tokens


class Style(ABC):
    """Format of a kind of replies."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, model: ServedModel, body: Any) -> None:
        self.model, self.body = model, body

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A whole choice."""
        text, tokens = choice.news()
        return self.chunk(choice, text, tokens=tokens)

    @abstractmethod
    def chunk(self, choice: Choice, text: str, *, tokens: range) -> dict[str, Any]:
        """A part of a choice."""

    def scored(
        self, choice: Choice, tokens: range
    ) -> Iterator[tuple[str, float, list[tuple[str, float]]]]:
        """Text, log-probability and alternatives of the next new tokens."""
        generation = choice.continuation.generation
        new, first = choice.tokens, len(generation.prompt)
        sequence = [*generation.prompt, *new]
        for place in tokens:
            score, token = generation.scores[place], new[place]
            text = choice.texts.add(token)
            if choice.finish and place == len(new) - 1:
                text += choice.texts.finish()
            before = sequence[: first + place]
            yield text, score.log_probability, self.model.alternatives(score, token, before=before)


class TextStyle(Style):
    object = chunk_object = "text_completion"
    id_prefix = "cmpl"
    body: CompletionRequest

    def chunk(self, choice: Choice, text: str, *, tokens: range) -> dict[str, Any]:
        """A part of a choice."""
        generation = choice.continuation.generation
        echo = ""
        if self.body.echo and not choice.is_begun:
            echo = "".join(self.model.prompt_texts(generation.prompt))
        logprobs = None if self.body.logprobs is None else self._logprobs(choice, tokens)
        choice.is_begun = True
        return {
            "index": choice.index,
            "text": echo + text,
            "finish_reason": choice.finish,
            "logprobs": logprobs,
        }

    def _logprobs(self, choice: Choice, tokens: range) -> dict[str, Any]:
        rows: list[tuple[str, float | None, list[tuple[str, float]]]] = []
        prompt = choice.continuation.generation.prompt
        if self.body.echo and not choice.is_begun:
            texts = self.model.prompt_texts(prompt)
            rows.append((texts[0], None, []))
            scores = choice.continuation.generation.prompt_scores
            for place, score in enumerate(scores, 1):
                alternatives = self.model.alternatives(score, prompt[place], before=prompt[:place])
                rows.append((texts[place], score.log_probability, alternatives))
        rows += self.scored(choice, tokens)
        *offsets, choice.offset = accumulate((len(row[0]) for row in rows), initial=choice.offset)
        return {
            "tokens": [text for text, _, _ in rows],
            "token_logprobs": [score for _, score, _ in rows],
            # Tokens can have the same text; the most likely one comes first and stays.
            "top_logprobs": [dict(reversed(pairs)) or None for _, _, pairs in rows],
            "text_offset": offsets,
        }


class ChatStyle(Style):
    object, chunk_object = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"
    body: ChatRequest

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A whole choice: the only part, under another name."""
        part = super().choice(choice)
        return {"message" if key == "delta" else key: value for key, value in part.items()}

    def chunk(self, choice: Choice, text: str, *, tokens: range) -> dict[str, Any]:
        """A part of a choice."""
        delta = {} if choice.is_begun else {"role": "assistant"}
        if text or not choice.is_begun:
            delta["content"] = text
        choice.is_begun = True
        return {
            "index": choice.index,
            "delta": delta,
            "finish_reason": choice.finish,
            "logprobs": self._logprobs(choice, tokens),
        }

    def _logprobs(self, choice: Choice, tokens: range) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        number = self.body.top_logprobs or 0
        return {
            "content": [
                {
                    **_token(text, score),
                    "top_logprobs": [_token(*pair) for pair in alternatives[:number]],
                }
                for text, score, alternatives in self.scored(choice, tokens)
            ]
        }


def _token(text: str, score: float) -> dict[str, Any]:
    return {"token": text, "logprob": score, "bytes": [*text.encode()]}
