"""Measure how fast a model continues prompts, beside `generate` of transformers.

    python benchmarks/generating.py --batches 1 8 --new-tokens 128 --work benchmark-work

Both read the same random Llama and continue the same prompts greedily, in fp32, in one process and
with the same threads; their tokens are compared. Rounds are interleaved. With --beside torch,
tokamake without its C++ takes the place of transformers.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tokamake.checkpoint.detect import open_any
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.engine import Generation, InferenceEngine
from tokamake.inference.layout import WHOLE_MODEL, Peers
from tokamake.inference.model import InferenceModel
from tokamake.inference.sampling_settings import Sampling
from tokamake.models.common import decoding
from tokamake.runtime.ranks import Ranks

SHAPES = {
    "tiny": (1024, 192, 512, 4, 4, 2),
    "135M": (49152, 576, 1536, 30, 9, 3),
}
"""Vocabulary, hidden size, intermediate size, layers, heads, key and value heads."""
CONTEXT = 1024


def main() -> None:
    """Measure each model and batch."""
    options = _options()
    print(f"model  batch   tokens/s   {options.beside:>12}   ratio   equal tokens")
    for name in options.models:
        folder = make_model(options.work / name, name)
        oracle = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        alone = Peers(Ranks(0, 1, 0, 1), torch.device("cpu"))
        model = DrivenModel(InferenceModel(open_any(folder), WHOLE_MODEL, peers=alone), 1)
        for batch in options.batches:
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(
                SHAPES[name][0], (batch, options.prompt_tokens), generator=generator
            )
            contestants: list[Callable[[], list[list[int]]]] = [
                partial(ours, model, prompts, options.new_tokens),
                partial(theirs, oracle, prompts, options.new_tokens)
                if options.beside == "transformers"
                else partial(without_cpp, model, prompts, options.new_tokens),
            ]
            seconds: list[list[float]] = [[], []]
            outputs = [contestant() for contestant in contestants]  # warms up
            for _ in range(options.rounds):
                for number, contestant in enumerate(contestants):
                    begin = time.perf_counter()
                    contestant()
                    seconds[number].append(time.perf_counter() - begin)
            mine, other = (batch * options.new_tokens / statistics.median(s) for s in seconds)
            same = sum(a == b for a, b in zip(*outputs, strict=True))
            print(
                f"{name:5} {batch:6} {mine:10.1f} {other:14.1f} {mine / other:7.2f}   "
                f"{same} of {batch} rows",
                flush=True,
            )


def make_model(folder: Path, name: str) -> Path:
    """A random Llama in the format of Hugging Face."""
    vocab_size, hidden, intermediate, layers, heads, groups = SHAPES[name]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def ours(model: DrivenModel, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
    """Continue prompts with tokamake's engine."""
    engine = InferenceEngine(
        model, num_rows=len(prompts), vocab_size=model.architecture.vocab_size or 0
    )
    started = [Generation(row, Sampling(temperature=0.0), new_tokens) for row in prompts.tolist()]
    engine.run(started)
    return [each.tokens for each in started]


def without_cpp(model: DrivenModel, prompts: torch.Tensor, new_tokens: int) -> list[list[int]]:
    """Continue prompts with tokamake's engine and single operations of torch."""
    with patch.object(decoding, "applies", return_value=False):
        return ours(model, prompts, new_tokens)


@torch.no_grad()
def theirs(
    model: transformers.LlamaForCausalLM, prompts: torch.Tensor, new_tokens: int
) -> list[list[int]]:
    """Continue prompts with transformers."""
    rows = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    continued: list[list[int]] = rows[:, prompts.shape[1] :].tolist()
    return continued


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", choices=["transformers", "torch"], default="transformers")
    parser.add_argument("--work", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
