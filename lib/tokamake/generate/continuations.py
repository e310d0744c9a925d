"""Continuations of prompts by a model that one or several ranks hold."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter

from tokamake.errors import UserError
from tokamake.inference.layout import InferenceLayout, peers
from tokamake.inference.sampling_settings import BeamSettings, Sampling, prompt_seed
from tokamake.retrieval.chunk_retriever import NO_NEIGHBORS, NeighborOptions, retrieve

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.data.tokenizers import Tokenizer
    from tokamake.inference.beams import Beam
    from tokamake.inference.driven_model import DrivenModel
    from tokamake.inference.engine import Generation
    from tokamake.inference.text_stream import TextStream


@Parameter(name="*")
@dataclass(frozen=True)
class Ends:
    """Limits that end a continuation, besides the end tokens of the model."""

    max_new_tokens: int = 64
    """Maximum tokens to add to a prompt."""
    stop: tuple[str, ...] = ()
    """Text at which a continuation ends, which is left out; repeat the option for each."""
    stop_token: tuple[int, ...] = ()
    """Token id at which a continuation ends, which is left out; repeat the option for each."""


@dataclass(frozen=True)
class Request:
    """Prompts, and how to continue them."""

    prompts: Sequence[str]
    ends: Ends
    sampling: Sampling
    chat: bool = False
    """Whether prompts are messages of a user, in the chat template of the tokenizer."""
    logprobs: bool = False
    """Whether samples have each token and its log-probability."""
    data_root: Path = Path()
    """Folder that the datasets of neighbors are relative to."""
    neighbors: NeighborOptions = NO_NEIGHBORS


@contextmanager
def continuing(
    checkpoint: Path, tokenizer: Path | None, *, request: Request, layout: InferenceLayout
) -> Iterator["Continuations | None"]:
    """Open a model on all ranks. The first rank continues the prompts; the others get None.

    Raises:
        UserError: on all ranks, if the model, its tokenizer and the prompts do not fit.
    """
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import end_tokens, tokenizer_of
    from tokamake.inference.driven_model import DrivenModel
    from tokamake.inference.model import InferenceModel

    with peers() as ranks:
        with ranks.together():
            opened = open_any(checkpoint)
            layout.check(opened.architecture, world_size=ranks.ranks.world_size)
            request.neighbors.check(opened.architecture)
            text_tokenizer = tokenizer_of(opened, tokenizer)
            _check_stop_tokens(request.ends, text_tokenizer)
            texts = request.prompts
            if request.chat:
                from tokamake.inference.chat import chat_prompt

                messages = ([{"role": "user", "content": text}] for text in texts)
                texts = tuple(chat_prompt(text_tokenizer, each) for each in messages)
            encoded = _encode(texts, opened, tokenizer=text_tokenizer, chat=request.chat)
        part = InferenceModel(opened, layout, peers=ranks)
        with ranks.together():
            retrieve(
                part,
                request.neighbors,
                data_root=request.data_root,
                tokenizer=text_tokenizer,
                peers=ranks,
            )
        model = DrivenModel(part, ranks.ranks.world_size)
        with ranks.together(), model.driven() as drives:
            if not drives:
                yield None
                return
            yield Continuations(
                model,
                text_tokenizer,
                request=request,
                encoded=encoded,
                end_tokens=end_tokens(opened, text_tokenizer),
            )


class Continuations:
    """Continues the prompts of a request; only on the first rank."""

    def __init__(
        self,
        model: "DrivenModel",
        tokenizer: "Tokenizer",
        *,
        request: Request,
        encoded: Sequence[list[int]],
        end_tokens: frozenset[int],
    ) -> None:
        self._model, self._tokenizer, self._encoded = model, tokenizer, encoded
        self._prompts, self._ends = request.prompts, request.ends
        self._end_tokens = end_tokens.union(request.ends.stop_token)
        self._sampling, self._logprobs = request.sampling, request.logprobs

    def sample(
        self, *, repetitions: Sequence[int], num_rows: int, stream: bool = False
    ) -> list[dict[str, Any]]:
        """Draw a continuation of each prompt; another repetition of a prompt is another draw."""
        from tokamake.inference.engine import InferenceEngine

        capacity = max(map(len, self._encoded)) + self._ends.max_new_tokens
        engine = InferenceEngine(
            self._model,
            num_rows=min(num_rows, len(self._prompts)),
            vocab_size=self._tokenizer.vocab_size,
            capacity=capacity,
        )
        started = []
        draws = zip(self._prompts, self._encoded, repetitions, strict=True)
        for prompt, tokens, repetition in draws:
            seed = prompt_seed(self._sampling.seed, prompt, repetition=repetition)
            text = self._text(tokens)
            show = _printer(prompt) if stream else (lambda _: None)
            started.append((self._generation(tokens, seed, text=text, show=show), text, show))
        samples = []
        # The end of a streamed text comes out before the next prompt.
        for together in [[each] for each in started] if stream else [started]:
            engine.run(generation for generation, _, _ in together)
            for generation, text, show in together:
                show(text.finish())
                samples.append(self._sample(generation, text))
        if stream:
            print()
        return samples

    def _text(self, prompt: Sequence[int]) -> "TextStream":
        from tokamake.inference.text_stream import TextStream

        return TextStream(self._tokenizer.decode, prompt, stops=self._ends.stop)

    def _generation(
        self, prompt: list[int], seed: int, *, text: "TextStream", show: Callable[[str], None]
    ) -> "Generation":
        from tokamake.inference.engine import Generation

        def accept(token: int) -> bool:
            show(text.add(token))
            return not text.is_stopped

        return Generation(
            prompt,
            replace(self._sampling, seed=seed),
            self._ends.max_new_tokens,
            end_tokens=self._end_tokens,
            num_alternatives=0 if self._logprobs else None,
            accept=accept,
        )

    def _sample(self, generation: "Generation", text: "TextStream") -> dict[str, Any]:
        sample: dict[str, Any] = {
            "text": text.text,
            "num_new_tokens": len(generation.tokens),
            "stopped": "stop" if self._is_asked(generation.end_token) else generation.finish,
        }
        if self._logprobs:
            # An end token, which is not among the tokens, has a score, too.
            pairs = zip(generation.tokens, generation.scores, strict=False)
            sample["tokens"] = [
                {
                    "id": token,
                    "text": self._tokenizer.decode([token]),
                    "log_probability": score.log_probability,
                }
                for token, score in pairs
            ]
        return sample

    def _is_asked(self, token: int | None) -> bool:
        """Whether a token ends continuations because the user says so."""
        return token in self._ends.stop_token

    def search(self, settings: BeamSettings) -> list[dict[str, Any]]:
        """Find the best continuation of each prompt with beam search."""
        from tokamake.inference.beams import TokenRules, search

        samples = []
        for prompt in self._encoded:
            best, *_ = search(
                self._model,
                prompt,
                beams=settings,
                max_new_tokens=self._ends.max_new_tokens,
                rules=TokenRules(self._end_tokens),
                vocab_size=self._tokenizer.vocab_size,
            )
            samples.append(self._beam_sample(best, self._text(prompt)))
        return samples

    def _beam_sample(self, beam: "Beam", text: "TextStream") -> dict[str, Any]:
        num_tokens = 0
        for token in beam.tokens:
            if text.is_stopped:
                break
            text.add(token)
            num_tokens += 1
        text.finish()
        if text.is_stopped or self._is_asked(beam.end_token):
            stopped = "stop"
        elif beam.end_token is not None:
            stopped = "eod"
        else:
            is_full = num_tokens == self._ends.max_new_tokens
            stopped = "max_new_tokens" if is_full else "context"
        return {
            "text": text.text,
            "num_new_tokens": num_tokens,
            "stopped": stopped,
            "score": beam.score,
        }


def _printer(prompt: str) -> Callable[[str], None]:
    """Function that prints text as it comes, the first time after the prompt."""
    pending = [f"\n{prompt}"]

    def show(text: str) -> None:
        sys.stdout.write((pending.pop() if pending else "") + text)
        sys.stdout.flush()

    return show


def _encode(
    texts: Sequence[str], checkpoint: "Checkpoint", *, tokenizer: "Tokenizer", chat: bool
) -> list[list[int]]:
    context_length = checkpoint.architecture.max_position_embeddings
    encoded = []
    for text in texts:
        # A chat template writes the first token itself.
        tokens = tokenizer.encode_batch([text])[0] if chat else tokenizer.encode_prompt(text)
        tokens = tokens or [tokenizer.eod]
        if len(tokens) > context_length:
            raise UserError(
                f"prompts: {text[:40]!r}: {len(tokens)} tokens, but the model sees only "
                f"{context_length}; shorten it"
            )
        encoded.append(tokens)
    return encoded


def _check_stop_tokens(ends: Ends, tokenizer: "Tokenizer") -> None:
    for token in ends.stop_token:
        if not 0 <= token < tokenizer.vocab_size:
            raise UserError(
                f"stop_token: {token}: not in the vocabulary; give 0 to {tokenizer.vocab_size - 1}"
            )
