"""Stage `generate`: continue prompts with an exported model."""

import hashlib
from pathlib import Path

from tokamake.errors import UserError


def generate(
    *,
    checkpoint: Path,
    tokenizer: Path,
    prompts: tuple[str, ...],
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 1234,
    output: Path,
) -> None:
    """Continue prompts with an exported model.

    A sample depends on the model, its prompt, the seed and the settings, but not on other prompts.
    A repeated prompt gets a different sample. An empty prompt begins a new document.

    Args:
        checkpoint: folder of a Hugging Face checkpoint, as `convert` writes it.
        tokenizer: tokenizer of the model.
        prompts: texts to continue; repeat the option for each.
        max_new_tokens: maximum tokens to add to a prompt.
        temperature: softmax temperature; 0 always takes the most likely token.
        top_k: number of most likely tokens to sample from; 0 for all.
        seed: seed of the sampling.
        output: JSON file: a list of prompt, text, num_new_tokens and stopped (eod, max_new_tokens,
            or context: the context of the model is full).

    Raises:
        UserError: a value is out of range, a prompt is too long, or files do not match.
    """
    from tokamake.checkpoint import model_tensors
    from tokamake.checkpoint.hf import hf_folder
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.files import write_json
    from tokamake.generate.decoding import Sampling, continue_tokens
    from tokamake.runtime.process_group import choose_device
    from tokamake.runtime.ranks import Ranks

    _check(prompts, max_new_tokens, temperature=temperature, top_k=top_k)
    sampling = Sampling(max_new_tokens, temperature, top_k)
    opened = open_tokenizer(tokenizer)
    architecture, weights = hf_folder.read(checkpoint)
    context_length = architecture.max_position_embeddings
    if (architecture.vocab_size or 0) < opened.vocab_size:
        raise UserError(
            f"{checkpoint}: its vocabulary has {architecture.vocab_size} entries, the tokenizer "
            f"{tokenizer} {opened.vocab_size}; give the tokenizer that the model was trained with"
        )
    device = choose_device(Ranks(rank=0, world_size=1, local_rank=0, local_size=1))
    model = model_tensors.to_model(architecture, weights).float().to(device).eval()
    samples = []
    for number, prompt in enumerate(prompts):
        tokens = opened.encode_batch([prompt])[0] or [opened.eod]
        if len(tokens) > context_length:
            raise UserError(
                f"prompts: {prompt[:40]!r}: {len(tokens)} tokens, but the model sees only "
                f"{context_length}; shorten it"
            )
        added, stopped = continue_tokens(
            model,
            tokens,
            sampling=sampling,
            tokenizer=opened,
            seed=_prompt_seed(seed, prompt, repetition=prompts[:number].count(prompt)),
        )
        # Decode prompt and continuation together: the text of a token may depend on the previous
        # token (spaces, characters split over tokens).
        full_text = opened.decode(tokens + added)
        text = full_text.removeprefix(opened.decode(tokens))
        samples.append(
            {"prompt": prompt, "text": text, "num_new_tokens": len(added), "stopped": stopped}
        )
        print(f"{prompt}{text}\n")
    write_json(output, samples)


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
