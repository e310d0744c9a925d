"""Comparison of a written Hugging Face folder with its source, by the logits of both models.

transformers loads the folder if it is installed, since users of the folder do; else tokamake does.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.errors import UserError
from tokamake.units import in_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tokamake.config.architecture import Architecture

_SEQUENCES, _LENGTH = 2, 64
"""Sequences that both models see, and their maximum length."""
_TOLERANCES = {None: 1e-3, "fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
"""Largest difference, relative to the largest logit, by the dtype of a cast."""
_NEEDED = 2.5
"""Memory for both models and their activations, in sizes of the fp32 model."""


def compare_logits(checkpoint: Checkpoint, folder: Path, *, dtype: str | None) -> str:
    """Compare the logits of both models on some tokens; return a line about it.

    `dtype`: that the weights were cast to; None: they were not. Too little memory is no error.
    """
    from tokamake.checkpoint.load_model import load_model

    shapes = checkpoint.source.shapes
    size = 4 * sum(math.prod(shapes[key]) for key in checkpoint.source if key.startswith("model."))
    if (needed := int(_NEEDED * size)) > (free := _free_memory()):
        return f"logits: not compared: needs {in_bytes(needed)} of memory, {in_bytes(free)} is free"
    expected = _logits(load_model(checkpoint).model, checkpoint)
    reader, model = _load(folder, checkpoint.architecture)
    actual = _logits(model, checkpoint)
    scale = max(float(expected.abs().max()), 1e-6)
    difference = float((actual - expected).abs().max()) / scale
    # Not `>`: a NaN must not pass. A source whose own logits are not finite is reported elsewhere.
    if expected.isfinite().all() and not difference <= _TOLERANCES[dtype]:
        raise UserError(
            f"{folder.name}: its logits, as {reader} computes them, differ from "
            f"{checkpoint.path} by {difference:.2g} of the largest; nothing is published: report "
            "this, or convert without --compare-logits"
        )
    return f"logits: equal to the source, by {reader} (difference {difference:.1g})"


def _load(folder: Path, architecture: "Architecture") -> tuple[str, "nn.Module"]:
    """Return the name of the program that loads the folder, and the model in fp32.

    transformers has no class of models with towers or neighbors.
    """
    is_foreign = architecture.has_towers or architecture.has_neighbors
    if find_spec("transformers") and not is_foreign:
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        kind = AutoModelForSeq2SeqLM if architecture.has_decoder else AutoModelForCausalLM
        model = kind.from_pretrained(folder, local_files_only=True)
        return "transformers", model.float()
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import load_model

    return "tokamake", load_model(open_any(folder)).model


def _logits(model: "nn.Module", checkpoint: Checkpoint) -> "Tensor":
    """(2, L, V) logits on tokens that depend on the shape of the model only; or vectors (4, D)."""
    import torch

    from tokamake.models.common.language_model import LanguageModel

    architecture = checkpoint.architecture
    length = min(_LENGTH, architecture.max_position_embeddings)
    tokens = torch.arange(_SEQUENCES * length).view(_SEQUENCES, length) * 7919
    tokens %= architecture.vocab_size or 1
    tokens = tokens.to(next(model.parameters()).device)
    inputs = {}
    if architecture.has_decoder:
        name = "decoder_tokens" if isinstance(model, LanguageModel) else "decoder_input_ids"
        inputs = {name: tokens.flip(1)}
    if architecture.has_towers:
        inputs = {"block_tokens": tokens.flip(1)}
    with torch.inference_mode():
        output = model.eval()(tokens, **inputs)
    if architecture.has_towers:
        return torch.cat((output.query_embeddings, output.block_embeddings)).float().cpu()
    return getattr(output, "logits", output).float().cpu()


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
