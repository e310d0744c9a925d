"""Stage `generate`: continue prompts with a model."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tokamake.errors import UserError
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout, peers
from tokamake.inference.sampling import BeamSettings, Sampling, prompt_seed

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.data.tokenizers import Tokenizer
    from tokamake.inference.beams import Beam
    from tokamake.inference.driven_model import DrivenModel
    from tokamake.inference.engine import Generation
    from tokamake.inference.text_stream import TextStream

_DEFAULT = Sampling()


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


_ENDS, _NO_BEAMS = Ends(), BeamSettings()


def generate(
    *,
    checkpoint: Path,
    tokenizer: Path | None = None,
    prompts: Annotated[tuple[str, ...], Parameter(alias="--prompt")],
    chat: Annotated[bool, Parameter(negative="")] = False,
    ends: Ends = _ENDS,
    sampling: Sampling = _DEFAULT,
    beams: BeamSettings = _NO_BEAMS,
    batch_size: int = 8,
    stream: Annotated[bool, Parameter(negative="")] = False,
    logprobs: Annotated[bool, Parameter(negative="")] = False,
    layout: InferenceLayout = WHOLE_MODEL,
    output: Path | None = None,
) -> None:
    """Continue prompts with a model.

    A sample depends on the model, its prompt, the seed and the settings, but not on other prompts.
    A repeated prompt gets a different sample. An empty prompt begins a new document. Prompts begin
    with BOS where transformers adds it, as for Llama's tokenizers.

    A model that is too large for one device is shared by several ranks, as for `evaluate`.

    Args:
        checkpoint: folder of a checkpoint of any format, or of a run, whose newest one counts.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        prompts: texts to continue; repeat the option for each.
        chat: whether prompts are messages of a user, in the chat template of the tokenizer.
        ends: limits that end a continuation.
        sampling: how the next token is chosen.
        beams: settings of beam search.
        batch_size: prompts that are continued at the same time.
        stream: whether to print text as it comes, one prompt after the other.
        logprobs: whether the output has each token and its log-probability.
        layout: how ranks share the model.
        output: JSON file: a list of prompt, text, num_new_tokens and stopped (eod, stop,
            max_new_tokens, or context: the context of the model is full). Beams have
            the score of the whole beam, also if its text ends at a stop.
    """
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import end_tokens, tokenizer_of
    from tokamake.files import write_json
    from tokamake.inference.driven_model import DrivenModel
    from tokamake.inference.model import InferenceModel

    _check(prompts, ends, beams=beams, batch_size=batch_size, sampling=sampling)
    for name, is_asked in (("stream", stream), ("logprobs", logprobs)):
        if beams.num_beams > 1 and is_asked:
            raise UserError(f"num_beams: {beams.num_beams}: with {name}; leave out one of them")
    with peers() as ranks:
        with ranks.together():
            opened = open_any(checkpoint)
            layout.check(opened.architecture, world_size=ranks.ranks.world_size)
            text_tokenizer = tokenizer_of(opened, tokenizer)
            _check_stop_tokens(ends, text_tokenizer)
            texts = prompts
            if chat:
                from tokamake.inference.chat import chat_prompt

                messages = ([{"role": "user", "content": text}] for text in prompts)
                texts = tuple(chat_prompt(text_tokenizer, each) for each in messages)
            encoded = _encode(texts, opened, tokenizer=text_tokenizer, chat=chat)
        part = InferenceModel(opened, layout, peers=ranks)
        model = DrivenModel(part, ranks.ranks.world_size)
        with ranks.together(), model.driven() as drives:
            if not drives:
                return
            work = _Work(
                model,
                text_tokenizer,
                ends=ends,
                end_tokens=end_tokens(opened, text_tokenizer),
                sampling=sampling,
                logprobs=logprobs,
            )
            if beams.num_beams > 1:
                samples = work.search(encoded, beams)
            else:
                samples = work.sample(
                    prompts, encoded, num_rows=1 if stream else batch_size, stream=stream
                )
            for prompt, sample in zip(prompts, samples, strict=True):
                sample["prompt"] = prompt
                if not stream:
                    print(f"{prompt}{sample['text']}\n", flush=True)
            if output:
                write_json(output, [{"prompt": each.pop("prompt"), **each} for each in samples])


class _Work:
    """Continues encoded prompts; only on the first rank."""

    def __init__(
        self,
        model: "DrivenModel",
        tokenizer: "Tokenizer",
        *,
        ends: Ends,
        end_tokens: frozenset[int],
        sampling: Sampling,
        logprobs: bool,
    ) -> None:
        self._model, self._tokenizer, self._ends = model, tokenizer, ends
        self._end_tokens = end_tokens.union(ends.stop_token)
        self._sampling, self._logprobs = sampling, logprobs

    def sample(
        self, prompts: Sequence[str], encoded: Sequence[list[int]], *, num_rows: int, stream: bool
    ) -> list[dict[str, Any]]:
        """Draw a continuation of each prompt."""
        from tokamake.inference.engine import InferenceEngine

        capacity = max(map(len, encoded)) + self._ends.max_new_tokens
        engine = InferenceEngine(
            self._model,
            num_rows=min(num_rows, len(prompts)),
            vocab_size=self._tokenizer.vocab_size,
            capacity=capacity,
        )
        started = []
        for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
            repetition = prompts[:number].count(prompt)
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

    def search(self, encoded: Sequence[list[int]], settings: BeamSettings) -> list[dict[str, Any]]:
        """Find the best continuation of each prompt with beam search."""
        from tokamake.inference.beams import TokenRules, search

        samples = []
        for prompt in encoded:
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


def _check(
    prompts: tuple[str, ...],
    ends: Ends,
    *,
    beams: BeamSettings,
    batch_size: int,
    sampling: Sampling,
) -> None:
    if not prompts:
        raise UserError("prompts: none given; name at least one text to continue")
    for name, value in (
        ("max_new_tokens", ends.max_new_tokens),
        ("num_beams", beams.num_beams),
        ("batch_size", batch_size),
    ):
        if value < 1:
            raise UserError(f"{name}: {value}: too small; give 1 or more")
    if not -10 <= beams.length_penalty <= 10:
        raise UserError(f"length_penalty: {beams.length_penalty}: out of range; give -10 to 10")
    if "" in ends.stop:
        raise UserError("stop: an empty text would end everything; remove it")
    sampling.check()
