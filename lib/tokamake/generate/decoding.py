"""Continue a sequence of tokens, one token at a time, with a key-value cache.

Shape suffixes: L tokens, V vocabulary.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.inference.model import InferenceModel

Stopped = Literal["eod", "max_new_tokens", "context"]


class Sampling(NamedTuple):
    """Settings of the choice of the next token."""

    max_new_tokens: int
    temperature: float
    """Divisor of the logits; 0 always takes the most likely token."""
    top_k: int
    """Number of most likely tokens to sample from; 0 for all."""


class Continuation(NamedTuple):
    """Tokens added to a prompt, without the end-of-document token, and the reason of the end."""

    tokens: list[int]
    stopped: Stopped


def continue_tokens(
    model: InferenceModel,
    prompt: list[int],
    *,
    sampling: Sampling,
    tokenizer: Tokenizer,
    seed: int,
) -> Continuation:
    """Sample tokens until the end-of-document token, `max_new_tokens` or the end of the context.

    All ranks of the model call this together, and get the same tokens.

    Args:
        model: model of any family; its context has `max_position_embeddings` tokens.
        prompt: one token to a full context of tokens.
        sampling: settings of the choice.
        tokenizer: tokenizer of the model. Padding entries of the model's vocabulary are never
            chosen.
        seed: seed of the sampling, which runs on the CPU to be the same for all devices.

    Raises:
        UserError: the logits of the model are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    context_length = model.architecture.max_position_embeddings
    cache, inputs, added = model.new_cache(), prompt, list[int]()
    while len(added) < sampling.max_new_tokens:
        if len(prompt) + len(added) > context_length:
            return Continuation(added, "context")
        logits = model.next_logits(torch.tensor([inputs], device=model.device), cache)

        def choose_next(logits: Tensor | None = logits) -> int:
            assert logits is not None, "the first rank has logits, and chooses"
            return choose(logits[0, : tokenizer.vocab_size], sampling, generator)

        token = model.agree(choose_next)
        if token == tokenizer.eod:
            return Continuation(added, "eod")
        added.append(token)
        inputs = [token]  # The cache holds all earlier tokens.
    return Continuation(added, "max_new_tokens")


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Take the most likely token at temperature 0, else sample one of the `top_k` most likely.

    Raises:
        UserError: the logits are not finite.
    """
    if not logits_V.isfinite().all():
        raise UserError("checkpoint: its predictions are not finite; train or export it again")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    num_kept = min(sampling.top_k or len(logits_V), len(logits_V))
    top_logits, tokens = logits_V.topk(num_kept)
    # Subtract the maximum first, so that a tiny temperature cannot overflow.
    probabilities = ((top_logits - top_logits[0]) / sampling.temperature).softmax(0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
