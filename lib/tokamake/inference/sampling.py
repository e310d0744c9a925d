"""Choice of the next token from logits: greedy, or a draw from some of the likely tokens.

The filters and their order are the same as in transformers: repetition penalty (arXiv 1909.05858),
then OpenAI's penalties of new tokens, temperature, top-k, top-p (arXiv 1904.09751), min-p
(arXiv 2407.01082).
Shape suffixes: N sequences, V vocabulary, K tokens that can be drawn.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tokamake.errors import UserError
from tokamake.inference.sampling_settings import Sampling

_LEAST_TEMPERATURE = 1e-30


def check_finite(logits: Tensor) -> None:
    if not logits.isfinite().all():
        raise UserError("checkpoint: its predictions are not finite; train or export it again")


def biased(logits_NV: Tensor, biases: Sequence[Mapping[int, float]]) -> Tensor:
    """Add values to the logits of some tokens of each row (N, V); -inf forbids a token."""
    places = [(row, token) for row, bias in enumerate(biases) for token in bias]
    if not places:
        return logits_NV
    values = logits_NV.new_tensor([value for bias in biases for value in bias.values()])
    rows, tokens = torch.tensor(places, device=logits_NV.device).unbind(1)
    return logits_NV.index_put((rows, tokens), values, accumulate=True)


class Chooser:
    """Chooses the tokens of one sequence, one after the other."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.sampling, self._seen = sampling, set(prompt)
        self._new = Counter[int]()
        self._random = random.Random(sampling.seed)

    def choose(self, logits_V: Tensor) -> int:
        """Choose the next token."""
        probabilities, tokens = distribution(
            logits_V, self.sampling, seen=self._seen, new=self._new
        )
        place = 0
        if self.sampling.temperature > 0:
            (place,) = _drawn(probabilities[None], [self])
        token = int(tokens[place])
        self._seen.add(token)
        self._new[token] += 1
        return token

    def next_number(self) -> float:
        """A random number from 0 to below 1, for one draw."""
        return self._random.random()


def choose_unfiltered(choosers: Sequence[Chooser], logits_NV: Tensor) -> list[int]:
    """Choose the next tokens of sequences whose settings are `is_unfiltered`, all at once.

    Each is the token that its `Chooser.choose` gives.
    """
    temperatures = [_temperature(chooser.sampling) for chooser in choosers]
    temperatures_N1 = torch.tensor(temperatures, device=logits_NV.device)[:, None]
    return _drawn(_probabilities(logits_NV, temperatures_N1), choosers)


def _drawn(probabilities_NK: Tensor, choosers: Sequence[Chooser]) -> list[int]:
    """Draw a place of each row."""
    # One number a draw: torch.multinomial takes one for each token of the vocabulary.
    sums_NK = probabilities_NK.cumsum(-1, dtype=torch.float64)
    numbers = [chooser.next_number() for chooser in choosers]
    targets_N = sums_NK.new_tensor(numbers) * sums_NK[:, -1]
    places = torch.searchsorted(sums_NK, targets_N[:, None], right=True)
    return places[:, 0].clamp(max=sums_NK.shape[1] - 1).tolist()


def _probabilities(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Softmax over the last dimension."""
    # Subtract the maximum first, so that a tiny temperature cannot overflow.
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)


def _temperature(sampling: Sampling) -> float:
    """The temperature; in fp32, one that is tinier than this would be 0."""
    return max(sampling.temperature, _LEAST_TEMPERATURE)


def distribution(
    logits_V: Tensor, sampling: Sampling, *, seen: set[int], new: Counter[int]
) -> tuple[Tensor, Tensor]:
    """(K,) probabilities and (K,) tokens that can be drawn.

    `seen` tokens occurred before; `new` ones were chosen before, with counts.
    """
    if sampling.repetition_penalty != 1 and seen:
        places = torch.tensor(sorted(seen), device=logits_V.device)
        old = logits_V[places]
        penalty = sampling.repetition_penalty
        logits_V = logits_V.index_copy(
            0, places, torch.where(old < 0, old * penalty, old / penalty)
        )
    if new and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = logits_V.new_tensor([*new.values()])
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        places = torch.tensor([*new], device=logits_V.device)
        logits_V = logits_V.index_add(0, places, -penalties)
    size, top_p = len(logits_V), sampling.top_p_of(new.total())
    top_k = 1 if sampling.temperature == 0 else min(sampling.top_k or size, size)
    if top_k < size or top_p < 1:
        logits_K, tokens_K = logits_V.topk(top_k)
    else:  # to sort a large vocabulary takes longer than the rest
        logits_K, tokens_K = logits_V, torch.arange(size, device=logits_V.device)
    if sampling.temperature == 0:
        return torch.ones_like(logits_K), tokens_K
    probabilities_K = _probabilities(logits_K, _temperature(sampling))
    if top_p == 1 and not sampling.min_p:
        return probabilities_K, tokens_K
    kept = torch.ones_like(probabilities_K, dtype=torch.bool)
    if top_p < 1:
        kept &= probabilities_K.cumsum(0) - probabilities_K < top_p
    if sampling.min_p:
        kept &= probabilities_K >= sampling.min_p * probabilities_K.max()
    kept |= probabilities_K == probabilities_K.max()  # also if top_p is 0 in fp32
    return probabilities_K[kept] / probabilities_K[kept].sum(), tokens_K[kept]
