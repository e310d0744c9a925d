"""Continuous batching: many sequences continue together, each one token per step.

Sequences join and leave between steps, so that a short one does not wait for long ones
(Orca, OSDI 2022). Each has a row of the key-value cache; the rows in use are the first ones.
Shape suffixes: N sequences of a pass, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import torch
from torch import Tensor

from tokamake.inference.beams import Beam, TokenRules, search
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.sampling import Chooser, biased, check_finite, choose_unfiltered
from tokamake.inference.sampling_settings import BeamSettings, Sampling

Finish = Literal["eod", "stop", "max_new_tokens", "context", "cancelled", "failed"]
"""Why a sequence ended: an end token, the caller's `accept`, a limit, no reader left, or an error.
"""

_PREFILL_TOKENS = 4096
"""Tokens of prompts in one pass, with padding, unless a single prompt is longer."""
_SCORED_TOKENS = 1024
"""Tokens of prompts that get scores in one pass: their logits are much larger than the prompts."""


@dataclass
class TokenScore:
    """Score of a token by the logits of the model, before any filter."""

    log_probability: float
    alternatives: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, the most likely one first."""


@dataclass(eq=False)
class Generation:
    """A sequence that the engine continues."""

    prompt: Sequence[int]
    """Tokens, at least one."""
    sampling: Sampling
    max_new_tokens: int
    """0: the prompt is only scored."""
    end_tokens: frozenset[int] = frozenset()
    """Tokens that end the sequence; they are not among its tokens."""
    num_alternatives: int | None = None
    """Tokens of `TokenScore.alternatives`; None: no scores are computed."""
    scores_prompt: bool = False
    accept: Callable[[int], bool] = lambda _: True
    """Called with each new token; False ends the sequence."""
    forbidden_after: Mapping[int, int] = field(default_factory=dict)
    """Token that must not follow a token."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """Values to add to the logits of tokens."""
    min_new_tokens: int = 0
    """Tokens before an end token."""

    tokens: list[int] = field(default_factory=list)
    """New tokens."""
    scores: list[TokenScore] = field(default_factory=list)
    """Scores of the new tokens, and of the end token."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Scores of the tokens of the prompt except the first."""
    end_token: int | None = None
    """The token that ended the sequence."""
    finish: Finish | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.sampling, self.prompt)

    @property
    def next_bias(self) -> dict[int, float]:
        never = [*(self.end_tokens if len(self.tokens) < self.min_new_tokens else ())]
        if (last := (self.tokens or self.prompt)[-1]) in self.forbidden_after:
            never.append(self.forbidden_after[last])
        return {**self.bias, **dict.fromkeys(never, -inf)}


class InferenceEngine:
    """Continues sequences with a model. Only the first rank has one.

    Args:
        num_rows: sequences that continue at the same time.
        vocab_size: tokens of the tokenizer; padding entries of the model are never chosen.
        capacity: longest sequence in tokens; None: the model's context.
    """

    def __init__(
        self, model: DrivenModel, *, num_rows: int, vocab_size: int, capacity: int | None = None
    ) -> None:
        context = model.architecture.max_position_embeddings
        self._model, self._num_rows, self._vocab_size = model, num_rows, vocab_size
        self.capacity = min(capacity or context, context)
        self._waiting: deque[Generation] = deque()
        self._has_begun = False
        self._active: list[Generation] = []
        self._ended: list[Generation] = []
        self._in_pass: list[Generation] = []
        self._has_logits = False
        self.renew_cache()

    def renew_cache(self) -> None:
        """Make the cache of the model this engine's again, while no sequence is active."""
        assert not self._active
        self._model.new_cache(self._num_rows, self.capacity)

    @property
    def num_ranks(self) -> int:
        return self._model.world_size

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Sequences that have a row."""
        return len(self._active)

    def add(self, generation: Generation) -> None:
        """Add a sequence; it begins with one of the next steps."""
        assert 0 < len(generation.prompt) <= self.capacity
        self._waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """End a sequence before its time; it gets no more tokens."""
        if generation.finish is None:
            generation.finish = "cancelled"

    def search(
        self,
        prompt: Sequence[int],
        beams: BeamSettings,
        *,
        max_new_tokens: int,
        rules: TokenRules,
        is_wanted: Callable[[], bool],
    ) -> list[Beam]:
        """Search beams with `beams.search`, while no sequence is active."""
        assert not self._active
        try:
            return search(
                self._model,
                prompt,
                beams=beams,
                max_new_tokens=max_new_tokens,
                rules=rules,
                vocab_size=self._vocab_size,
                is_wanted=is_wanted,
            )
        finally:
            self.renew_cache()

    def run(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            self.add(generation)
        while self._waiting or self._active:
            for generation in self.step():
                if generation.error:
                    raise generation.error

    def step(self) -> list[Generation]:
        """Begin waiting sequences if there is room, else give each active one a token.

        Active sequences get a token after each beginning, so that new ones do not stop them.
        Returns the sequences that got a token or ended.
        """
        self._ended = [each for each in (*self._waiting, *self._active) if each.finish]
        self._has_logits = False
        self._waiting = deque(each for each in self._waiting if not each.finish)
        self._remove_finished()
        begun = [] if self._has_begun and self._active else self._next_to_begin()
        self._has_begun = bool(begun)
        self._in_pass = begun or [*self._active]
        if begun:
            first = len(self._active)
            self._active += begun
            if sum(map(_num_scored, begun)) > _SCORED_TOKENS:  # this is one sequence
                self._begin_in_parts(begun[0], first)
            else:
                self._begin(begun, first)
        elif self._active:
            self._continue(self._in_pass)
        self._remove_finished()
        return self._ended + self._in_pass

    def drop_pass(self, error: Exception) -> list[Generation]:
        """End sequences of a step that ran out of memory; the remaining sequences can continue.

        In a pass of one token each, the longest sequence ends: it makes the cache grow.
        Returns the sequences that ended, also before the pass.
        """
        left = [each for each in self._in_pass if each.finish is None]
        if not self._has_logits and not self._has_begun:
            left = sorted(left, key=lambda each: len(each.prompt) + len(each.tokens))[-1:]
        for each in left:
            each.finish, each.error = "failed", error
        self._remove_finished()
        if not self._active:
            self.renew_cache()  # frees its memory
        return self._ended + [each for each in self._in_pass if each.finish]

    def _next_to_begin(self) -> list[Generation]:
        begun, longest, num_scored = list[Generation](), 0, 0
        while self._waiting and len(self._active) + len(begun) < self._num_rows:
            longest = max(longest, len(self._waiting[0].prompt))
            num_scored += _num_scored(self._waiting[0])
            is_large = longest * (len(begun) + 1) > _PREFILL_TOKENS or num_scored > _SCORED_TOKENS
            if begun and is_large:
                break
            begun.append(self._waiting.popleft())
        return begun

    def _begin_in_parts(self, generation: Generation, row: int) -> None:
        """Score a long prompt, and begin its sequence."""
        prompt, number = generation.prompt, generation.num_alternatives or 0
        for start in range(0, len(prompt), _SCORED_TOKENS):
            part = prompt[start : start + _SCORED_TOKENS]
            logits = self._model.extend([part], first=row, predicting=[range(len(part))])
            following = prompt[start + 1 : start + 1 + len(part)]
            with _failing(generation):
                scores = self._scores(logits[: len(following)], following, number)
                generation.prompt_scores += scores
        self._choose([generation], logits[-1:])

    def _begin(self, begun: Sequence[Generation], first: int) -> None:
        lengths = [len(each.prompt) for each in begun]
        predicting = [
            range(0 if each.scores_prompt else length - 1, length)
            for each, length in zip(begun, lengths, strict=True)
        ]
        rows = [each.prompt for each in begun]
        logits = self._model.extend(rows, first=first, predicting=predicting)
        parts = logits.split([len(kept) for kept in predicting])
        for each, part in zip(begun, parts, strict=True):
            if each.scores_prompt:
                number = each.num_alternatives or 0
                with _failing(each):
                    each.prompt_scores = self._scores(part[:-1], each.prompt[1:], number)
        self._choose(begun, torch.stack([part[-1] for part in parts]))

    def _continue(self, active: Sequence[Generation]) -> None:
        logits = self._model.extend([each.tokens[-1:] for each in active])
        self._choose(active, logits)

    def _choose(self, generations: Sequence[Generation], logits_NV: Tensor) -> None:
        """Give each sequence its next token, or end it."""
        self._has_logits = True
        known_NV = logits_NV[:, : self._vocab_size]
        if not known_NV.isfinite().all():
            for row, each in enumerate(generations):
                with _failing(each):
                    check_finite(known_NV[row])
        choices = self._choices(generations, known_NV)
        for row, (each, token) in enumerate(zip(generations, choices, strict=True)):
            with _failing(each):
                if each.finish is None:
                    self._take(each, token, logits_1V=logits_NV[row, None])

    def _take(self, generation: Generation, token: int, *, logits_1V: Tensor) -> None:
        if not generation.max_new_tokens:
            generation.finish = "max_new_tokens"
            return
        if (number := generation.num_alternatives) is not None:
            generation.scores += self._scores(logits_1V, [token], number)
        if token in generation.end_tokens:
            generation.end_token, generation.finish = token, "eod"
            return
        generation.tokens.append(token)
        generation.finish = self._finish(generation, token)

    def _choices(self, generations: Sequence[Generation], logits_NV: Tensor) -> list[int]:
        logits_NV = biased(logits_NV, [each.next_bias for each in generations])
        tokens: list[int] = logits_NV.argmax(-1).tolist()
        unfiltered = [row for row, each in enumerate(generations) if each.sampling.is_unfiltered]
        if unfiltered:
            choosers = [generations[row].chooser for row in unfiltered]
            drawn = choose_unfiltered(choosers, logits_NV[unfiltered])
            for row, token in zip(unfiltered, drawn, strict=True):
                tokens[row] = token
        for row, each in enumerate(generations):
            if not (each.sampling.is_plain_greedy or each.sampling.is_unfiltered):
                with _failing(each):
                    tokens[row] = each.chooser.choose(logits_NV[row])
        return tokens

    def _scores(
        self, logits_NV: Tensor, tokens: Sequence[int], num_alternatives: int
    ) -> list[TokenScore]:
        """Scores of tokens, with the most likely ones beside them.

        Padding entries of the model take their share, as in training.
        """
        log_probabilities = logits_NV.log_softmax(-1)[:, : self._vocab_size]
        check_finite(log_probabilities)
        targets = torch.tensor([*tokens], device=logits_NV.device)
        chosen = log_probabilities.gather(-1, targets[:, None])[:, 0].tolist()
        values, places = log_probabilities.topk(min(num_alternatives, self._vocab_size))
        pairs = zip(places.tolist(), values.tolist(), strict=True)
        return [
            TokenScore(score, [*zip(*pair, strict=True)])
            for score, pair in zip(chosen, pairs, strict=True)
        ]

    def _finish(self, generation: Generation, token: int) -> Finish | None:
        if not generation.accept(token):
            return "stop"
        if len(generation.tokens) == generation.max_new_tokens:
            return "max_new_tokens"
        if len(generation.prompt) + len(generation.tokens) > self.capacity:
            return "context"
        return None

    def _remove_finished(self) -> None:
        """Free the rows of sequences that ended; the last rows in use take their places."""
        for row in reversed(range(len(self._active))):
            if self._active[row].finish:
                self._model.clear(row)
                last = self._active.pop()
                if row < len(self._active):
                    self._active[row] = last
                    self._model.move(len(self._active), row)
                    self._model.clear(len(self._active))


@contextmanager
def _failing(generation: Generation) -> Iterator[None]:
    """Context whose errors end one sequence; the first one stays."""
    try:
        yield
    except Exception as error:
        generation.finish, generation.error = "failed", generation.error or error


def _num_scored(generation: Generation) -> int:
    """Tokens of the prompt that get scores."""
    return len(generation.prompt) if generation.scores_prompt else 0
