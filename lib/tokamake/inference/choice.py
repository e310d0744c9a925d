"""Choice of the next token from logits: greedy, or a draw from some of the likely tokens.

The filters and their order are those of transformers: repetition penalty (arXiv 1909.05858),
temperature, top-k, top-p (arXiv 1904.09751), min-p (arXiv 2407.01082).
Shape suffixes: V vocabulary, K tokens that can be drawn.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamake.errors import UserError
from tokamake.inference.sampling import Sampling

_LEAST_TEMPERATURE = 1e-30


def check_finite(logits: Tensor) -> None:
    """Check that logits can be compared.

    Raises:
        UserError: one is NaN or infinite.
    """
    if not logits.isfinite().all():
        raise UserError("checkpoint: its predictions are not finite; train or export it again")


class Chooser:
    """Chooses the tokens of one sequence, one after the other.

    Draws run on the CPU, to be the same for all devices.

    Args:
        sampling: the settings.
        prompt: tokens before the first choice.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling, self._seen, self._num_new = sampling, set(prompt), 0
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits_V: Tensor) -> int:
        """Choose the next token."""
        probabilities, tokens = distribution(
            logits_V, self._sampling, seen=self._seen, num_new=self._num_new
        )
        place = 0
        if self._sampling.temperature > 0:
            drawn = torch.multinomial(probabilities.cpu(), 1, generator=self._generator)
            place = int(drawn)
        token = int(tokens[place])
        self._seen.add(token)
        self._num_new += 1
        return token


def distribution(
    logits_V: Tensor, sampling: Sampling, *, seen: set[int], num_new: int
) -> tuple[Tensor, Tensor]:
    """Tokens that can be drawn, and their probabilities.

    Args:
        logits_V: logits in fp32.
        sampling: the settings.
        seen: tokens that occurred before.
        num_new: tokens that were chosen before.

    Returns:
        (K,) probabilities and (K,) tokens.
    """
    if sampling.repetition_penalty != 1 and seen:
        places = torch.tensor(sorted(seen), device=logits_V.device)
        old = logits_V[places]
        penalty = sampling.repetition_penalty
        logits_V = logits_V.index_copy(
            0, places, torch.where(old < 0, old * penalty, old / penalty)
        )
    size, top_p = len(logits_V), sampling.top_p_of(num_new)
    top_k = 1 if sampling.temperature == 0 else min(sampling.top_k or size, size)
    if top_k < size or top_p < 1:
        logits_K, tokens_K = logits_V.topk(top_k)
    else:  # to sort a large vocabulary takes longer than the rest
        logits_K, tokens_K = logits_V, torch.arange(size, device=logits_V.device)
    if sampling.temperature == 0:
        return torch.ones_like(logits_K), tokens_K
    # Subtract the maximum first, so that a tiny temperature cannot overflow; in fp32, one that is
    # tinier still would be 0.
    temperature = max(sampling.temperature, _LEAST_TEMPERATURE)
    probabilities_K = ((logits_K - logits_K.max()) / temperature).softmax(0)
    kept = torch.ones_like(probabilities_K, dtype=torch.bool)
    if top_p < 1:
        kept &= probabilities_K.cumsum(0) - probabilities_K < top_p
    if sampling.min_p:
        kept &= probabilities_K >= sampling.min_p * probabilities_K.max()
    kept |= probabilities_K == probabilities_K.max()  # also if top_p is 0 in fp32
    return probabilities_K[kept] / probabilities_K[kept].sum(), tokens_K[kept]
