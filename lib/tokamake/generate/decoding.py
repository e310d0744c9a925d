"""Continues one sequence of tokens, one token at a time, with keys and values cached.

Shape suffixes: L tokens, V vocabulary.
"""

from typing import Any, Literal, NamedTuple

import torch

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

Stopped = Literal["eod", "max_new_tokens", "context"]


class Sampling(NamedTuple):
    """How the next token is chosen."""

    max_new_tokens: int
    temperature: float
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int
    """Likeliest tokens to draw among; 0 for all."""


class Continuation(NamedTuple):
    """Tokens added to a prompt, without an end-of-document token, and why there are no more."""

    tokens: list[int]
    stopped: Stopped


def continue_tokens(
    model: Any,
    prompt: list[int],
    *,
    sampling: Sampling,
    tokenizer: Tokenizer,
    seed: int,
) -> Continuation:
    """Draw tokens until the end of the document, the wanted number or the end of the context.

    Args:
        model: of any family; it sees at most `max_position_embeddings` tokens.
        prompt: at least one token and no more than the model can see.
        sampling: how to choose.
        tokenizer: says which token ends a document; others than its own are never chosen, though
            a padded vocabulary has them.
        seed: of the draws; they are made on the CPU wherever the model lies.

    Raises:
        UserError: the model predicts what is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    context_length = model.architecture.max_position_embeddings
    cache, seen, added = model.new_cache(), prompt, list[int]()
    with torch.inference_mode():
        while len(added) < sampling.max_new_tokens:
            if len(prompt) + len(added) > context_length:
                return Continuation(added, "context")
            logits_V = model(torch.tensor([seen], device=device), cache)[0, -1]
            token = choose(logits_V[: tokenizer.vocab_size].float().cpu(), sampling, generator)
            if token == tokenizer.eod:
                return Continuation(added, "eod")
            added.append(token)
            seen = [token]
    return Continuation(added, "max_new_tokens")


def choose(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Take the likeliest token at temperature 0, else draw one among the `top_k` likeliest.

    Raises:
        UserError: the logits are not finite.
    """
    if not logits_V.isfinite().all():
        raise UserError("checkpoint: its predictions are not finite; train or export it again")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    kept = min(sampling.top_k or len(logits_V), len(logits_V))
    likeliest, tokens = logits_V.topk(kept)
    # The largest is 0 after the subtraction, so that a tiny temperature cannot overflow.
    probabilities = ((likeliest - likeliest[0]) / sampling.temperature).softmax(0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
