"""Stage `generate`: continue prompts with a model."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tokamake.errors import UserError
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout, peers

if TYPE_CHECKING:
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.data.tokenizers import Tokenizer


def generate(
    *,
    checkpoint: Path,
    tokenizer: Path | None = None,
    prompts: Annotated[tuple[str, ...], Parameter(alias="--prompt")],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 1234,
    layout: InferenceLayout = WHOLE_MODEL,
    output: Path | None = None,
) -> None:
    """Continue prompts with a model.

    A sample depends on the model, its prompt, the seed and the settings, but not on other prompts.
    A repeated prompt gets a different sample. An empty prompt begins a new document.

    A model that is too large for one device is shared by several ranks, as for `evaluate`.

    Args:
        checkpoint: folder of a checkpoint of any format, or of a run, whose newest one counts.
        tokenizer: tokenizer of the model; by default the one beside its weights, or the one that
            the run.yaml of the checkpoint names.
        prompts: texts to continue; repeat the option for each.
        max_new_tokens: maximum tokens to add to a prompt.
        temperature: softmax temperature; 0 always takes the most likely token.
        top_k: number of most likely tokens to sample from; 0 for all.
        seed: seed of the sampling.
        layout: how ranks share the model.
        output: JSON file: a list of prompt, text, num_new_tokens and stopped (eod, max_new_tokens,
            or context: the context of the model is full).

    Raises:
        UserError: a value is out of range, a prompt is too long, or files do not match.
    """
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import tokenizer_of
    from tokamake.files import write_json
    from tokamake.generate.decoding import Sampling, continue_tokens
    from tokamake.inference.model import InferenceModel

    _check(prompts, max_new_tokens, temperature=temperature, top_k=top_k)
    sampling = Sampling(max_new_tokens, temperature, top_k)
    with peers() as ranks:
        with ranks.together():
            opened = open_any(checkpoint)
            layout.check(opened.architecture, world_size=ranks.ranks.world_size)
            text_tokenizer = tokenizer_of(opened, tokenizer)
            encoded = _encode(prompts, opened, tokenizer=text_tokenizer)
        model = InferenceModel(opened, layout, peers=ranks)
        samples = []
        for number, (prompt, tokens) in enumerate(zip(prompts, encoded, strict=True)):
            added, stopped = continue_tokens(
                model,
                tokens,
                sampling=sampling,
                tokenizer=text_tokenizer,
                seed=_prompt_seed(seed, prompt, repetition=prompts[:number].count(prompt)),
            )
            # Decode prompt and continuation together: the text of a token may depend on the
            # previous token (spaces, characters split over tokens).
            full_text = text_tokenizer.decode(tokens + added)
            text = full_text.removeprefix(text_tokenizer.decode(tokens))
            samples.append(
                {"prompt": prompt, "text": text, "num_new_tokens": len(added), "stopped": stopped}
            )
            ranks.ranks.print_once(f"{prompt}{text}\n")
        with ranks.together():
            if output and ranks.is_first:
                write_json(output, samples)


def _encode(
    prompts: tuple[str, ...], checkpoint: "Checkpoint", *, tokenizer: "Tokenizer"
) -> list[list[int]]:
    """Tokens of each prompt.

    Raises:
        UserError: a prompt is longer than the context of the model.
    """
    context_length = checkpoint.architecture.max_position_embeddings
    encoded = []
    for prompt in prompts:
        tokens = tokenizer.encode_batch([prompt])[0] or [tokenizer.eod]
        if len(tokens) > context_length:
            raise UserError(
                f"prompts: {prompt[:40]!r}: {len(tokens)} tokens, but the model sees only "
                f"{context_length}; shorten it"
            )
        encoded.append(tokens)
    return encoded


def _prompt_seed(seed: int, prompt: str, *, repetition: int) -> int:
    """Return a different seed for each prompt and each repetition of a prompt."""
    digest = hashlib.sha256(f"{seed} {repetition} {prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _check(
    prompts: tuple[str, ...], max_new_tokens: int, *, temperature: float, top_k: int
) -> None:
    if not prompts:
        raise UserError("prompts: none given; name at least one text to continue")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens: {max_new_tokens}: too small; give 1 or more")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature: {temperature}: out of range; give 0 or more")
    if top_k < 0:
        raise UserError(f"top_k: {top_k}: out of range; give 0 for all, or more")
