"""Beam search: keep the continuations with the highest total log-probabilities.

Algorithm and scores are the same as in transformers with `early_stopping=False`: a finished
continuation of n tokens scores its log-probability divided by n to the power of the length penalty.
Shape suffixes: W beams, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import torch

from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.sampling import biased, check_finite
from tokamake.inference.sampling_settings import BeamSettings


@dataclass(frozen=True)
class TokenRules:
    """Tokens with an effect of their own."""

    end_tokens: frozenset[int]
    forbidden_after: Mapping[int, int] = field(default_factory=dict)
    """Token that must not follow a token."""


class Beam(NamedTuple):
    """A continuation of the prompt."""

    tokens: list[int]
    """New tokens, without an end token."""
    score: float
    """Log-probability divided by the length to the power of the penalty."""
    end_token: int | None = None


def search(
    model: DrivenModel,
    prompt: Sequence[int],
    *,
    beams: BeamSettings,
    max_new_tokens: int,
    rules: TokenRules,
    vocab_size: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Beam]:
    """The best continuations of a prompt, the best one first; the cache of the model is replaced.

    The context of the model may end continuations before `max_new_tokens`. `is_wanted` is called
    before each pass; False ends the search with the beams so far.
    """
    num_beams, length_penalty = beams.num_beams, beams.length_penalty
    limit = model.architecture.max_position_embeddings
    max_new_tokens = min(max_new_tokens, limit + 1 - len(prompt))
    if not is_wanted():
        return []
    model.new_cache(num_beams, min(len(prompt) + max_new_tokens, limit))
    logits = model.extend([prompt])
    running = [Beam([], 0.0)]
    finished: list[Beam] = []
    for length in range(1, max_new_tokens + 1):
        check_finite(logits[:, :vocab_size])
        lasts = [(beam.tokens or prompt)[-1] for beam in running]
        never = rules.forbidden_after
        logits = biased(logits, [{never[n]: -inf} if n in never else {} for n in lasts])
        totals = torch.tensor([beam.score for beam in running], device=logits.device)
        scores = (logits.log_softmax(-1)[:, :vocab_size] + totals[:, None]).flatten()
        # Even if each beam ends with each end token, W candidates continue.
        number = max(2, 1 + len(rules.end_tokens)) * num_beams
        values, places = scores.topk(min(number, len(scores)))
        kept, sources = list[Beam](), list[int]()
        for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            source, token = divmod(place, vocab_size)
            if token in rules.end_tokens:
                if rank < num_beams:
                    score = value / length**length_penalty
                    finished.append(Beam(running[source].tokens, score, token))
            elif len(kept) < num_beams:
                kept.append(Beam([*running[source].tokens, token], value))
                sources.append(source)
        finished = _best(finished, num_beams)
        running = kept
        is_full = len(finished) == num_beams
        if is_full and running[0].score / length**length_penalty <= finished[-1].score:
            return finished
        if length < max_new_tokens:
            if not is_wanted():
                break
            if sources != [*range(len(sources))]:
                model.reorder(sources)
            logits = model.extend([beam.tokens[-1:] for beam in running])
    scale = max_new_tokens**length_penalty
    ended = [beam._replace(score=beam.score / scale) for beam in running]
    return _best([*finished, *ended], num_beams)


def _best(beams: Sequence[Beam], number: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score)[:number]
