"""Beam search: the continuation with the highest total log-probability, among those kept.

The algorithm and its scores are those of transformers, with `early_stopping=False`: a finished
continuation of n tokens scores its log-probability divided by n to the power of the length penalty.
Shape suffixes: W beams, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tokamake.inference.choice import check_finite
from tokamake.inference.led_model import LedModel
from tokamake.inference.sampling import BeamSettings


class Beam(NamedTuple):
    """A continuation of the prompt."""

    tokens: list[int]
    """New tokens, without an end token."""
    score: float
    """Log-probability divided by the length to the power of the penalty."""
    is_ended: bool
    """Whether an end token followed."""


def search(
    model: LedModel,
    prompt: Sequence[int],
    *,
    beams: BeamSettings,
    max_new_tokens: int,
    end_token: int,
    vocab_size: int,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Beam]:
    """The best continuations of a prompt, the best one first.

    Args:
        model: the model, within its `led` context; its cache is replaced.
        prompt: one token or more.
        beams: W, the continuations to keep, and the exponent of their length; more than 0 favours
            long continuations.
        max_new_tokens: longest continuation; the context of the model may end it earlier.
        end_token: token that ends a continuation.
        vocab_size: tokens of the tokenizer.
        is_wanted: called before each pass; False ends the search with what there is.

    Raises:
        UserError: the logits of the model are not finite.
    """
    num_beams, length_penalty = beams.num_beams, beams.length_penalty
    limit = model.architecture.max_position_embeddings
    max_new_tokens = min(max_new_tokens, limit + 1 - len(prompt))
    if not is_wanted():
        return []
    model.new_cache(num_beams, min(len(prompt) + max_new_tokens, limit))
    logits = model.extend([prompt])
    running = [Beam([], 0.0, is_ended=False)]
    finished: list[Beam] = []
    for length in range(1, max_new_tokens + 1):
        check_finite(logits[:, :vocab_size])
        totals = torch.tensor([beam.score for beam in running], device=logits.device)
        scores = (logits.log_softmax(-1)[:, :vocab_size] + totals[:, None]).flatten()
        # Half of twice as many candidates could end, and W of the others still go on.
        values, places = scores.topk(min(2 * num_beams, len(scores)))
        kept, sources = list[Beam](), list[int]()
        for rank, (value, place) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            source, token = divmod(place, vocab_size)
            if token == end_token:
                if rank < num_beams:
                    score = value / length**length_penalty
                    finished.append(Beam(running[source].tokens, score, is_ended=True))
            elif len(kept) < num_beams:
                kept.append(Beam([*running[source].tokens, token], value, is_ended=False))
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
