"""Compare the trainer with other loops: same shape, data, batch, dtype, clipping, fused AdamW.

    python benchmarks/training.py --rounds 12 --threads 2 --litgpt litgpt-venv/bin/python
    python benchmarks/training.py --family bert
    python benchmarks/training.py --family qwen3_moe

All contestants of a precision run at the same time and take one step each in turns, so that a slow
minute of the machine affects all of them. Ratios are medians over rounds. The peer is the same
model of transformers. A Llama has a second peer, litgpt's, if a Python with litgpt is given. A BERT
has two: transformers' MegatronBert as it is, and with logits of masked tokens alone. Experts have
two as well: transformers' loop over experts (eager), and its product for all of them (grouped).
Peers compute bf16 with autocast, as in their own trainers. Other measurements: the share of the
trainer's step that is neither forward, backward nor optimizer; the time from the start to the end
of the first step; peak memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
"""32 million parameters."""
BERT = {
    "vocab_size": 30522,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
"""42 million parameters."""
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}
WIDE = {"num_experts": 8, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 64, "sliding_window": 256},
    "gemma3": {"head_dim": 64, "sliding_window": 256},
    "gpt_neox": {"num_key_value_heads": 8, "intermediate_size": 2048},
    "mistral": {"sliding_window": 256},
    "mixtral": {"intermediate_size": 704, **WIDE},
    "olmo3": {"sliding_window": 256},
    "olmoe": {"intermediate_size": 352, **EXPERTS},
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"moe_intermediate_size": 352, "head_dim": 64, **EXPERTS},
}
"""Settings of families that differ from SHAPE. A token's experts are as wide as the dense MLP."""
ROWS, LENGTH = 4, 512
PRECISIONS = ("fp32", "bf16")

Step = Callable[[Any], float]
"""Function that trains on rows of tokens, or on masked samples, and returns seconds of forward,
backward, optimizer."""


def main() -> None:
    """Measure and print tables."""
    # A comparison on CPUs: contestants must not see a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="measured steps")
    parser.add_argument("--warmup-rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--family", default="llama", help="bert or a causal family")
    parser.add_argument("--litgpt", help="a Python with litgpt, in its own environment")
    parser.add_argument("--contestant", help="internal: what a process trains, and how")
    options = parser.parse_args()
    if options.contestant:
        compete(*options.contestant.split())
        return
    peers = ["transformers"]
    if options.family == "bert":
        peers = ["transformers", "transformers-masked"]
    elif architecture(options.family).has_routers:
        peers = ["transformers-eager", "transformers-grouped"]
    pythons = dict.fromkeys(peers, sys.executable)
    pythons |= {"litgpt": options.litgpt, "tokamake": sys.executable}
    pythons = {name: python for name, python in pythons.items() if python}
    with tempfile.TemporaryDirectory() as folder:
        write_start(Path(folder), options.family)
        results = {
            precision: in_turns(precision, pythons, folder, options) for precision in PRECISIONS
        }
    print_tables(results, list(pythons))


def in_turns(
    precision: str, pythons: dict[str, str], folder: str, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Run a step of each contestant, round by round."""
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        steps = {}
        for name, python in pythons.items():
            begin = time.perf_counter()
            contestant = f"{name} {options.family} {precision} {folder}"
            command = [python, __file__, "--contestant", contestant]
            steps[name] = start(command, options.threads, stack)
            steps[name]()
            first = time.perf_counter() - begin
            results[name] = {"first": first, "seconds": [], "other": []}
        names = [*steps]
        for number in range(options.warmup_rounds + options.rounds):
            for place in range(len(names)):  # rotate the order, so that each one comes first
                name = names[(place + number) % len(names)]
                cost, result = steps[name](), results[name]
                result["peak_bytes"] = cost["peak_bytes"]
                if number >= options.warmup_rounds:
                    result["seconds"].append(cost["seconds"])
                    result["other"].append(1 - cost["passes"] / cost["seconds"])
            last = {
                name: f"{result['seconds'][-1]:.3f}"
                for name, result in results.items()
                if result["seconds"]
            }
            print(precision, number, last, file=sys.stderr, flush=True)
    return results


def start(command: list[str], threads: int, stack: ExitStack) -> Callable[[], dict[str, float]]:
    """Start a contestant and return a function that runs a step and returns its cost."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
    requests, replies = process.stdin, process.stdout
    assert requests is not None
    assert replies is not None
    stack.callback(requests.close)

    def step() -> dict[str, float]:
        print("step", file=requests, flush=True)
        cost: dict[str, float] = json.loads(replies.readline())
        return cost

    return step


def print_tables(results: dict[str, dict[str, dict[str, Any]]], names: list[str]) -> None:
    """Print a table of speeds, and one of peak memory and first steps."""
    peers = names[:-1]
    titles = [f"{name}, tokens/s" for name in names] + [f"to {name}" for name in peers] + ["other"]
    print("| |", " | ".join(titles), "|")
    print("|", " | ".join(["---"] * (len(titles) + 1)), "|")
    for precision, by_name in results.items():
        own = by_name["tokamake"]
        cells = [f"{ROWS * LENGTH / median(by_name[name]['seconds']):,.0f}" for name in names]
        for peer in peers:
            pairs = zip(by_name[peer]["seconds"], own["seconds"], strict=True)
            cells.append(f"{median(theirs / ours for theirs, ours in pairs):.2f}")
        print(f"| {precision} |", " | ".join(cells), f"| {median(own['other']):.1%} |")
    titles = [f"{name}, {unit}" for unit in ("peak MB", "first step s") for name in names]
    print("\n| |", " | ".join(titles), "|")
    print("|", " | ".join(["---"] * (len(titles) + 1)), "|")
    for precision, by_name in results.items():
        cells = [f"{by_name[name]['peak_bytes'] / 1e6:,.0f}" for name in names]
        cells += [f"{by_name[name]['first']:.1f}" for name in names]
        print(f"| {precision} |", " | ".join(cells), "|")


def compete(name: str, family: str, precision: str, folder: str) -> None:
    """Run a step on the same random tokens for each line of standard input and print its cost."""
    rows: Any = masked_rows() if family == "bert" else token_rows()
    with ExitStack() as stack:
        if name == "tokamake":
            step = tokamake_step(family, precision, Path(folder), stack)
        elif family == "bert":
            step = plain_step(*transformers_bert(of_masked=name.endswith("-masked")), precision)
        else:
            model = litgpt_model() if name == "litgpt" else transformers_model(Path(folder), name)
            step = plain_step(*causal(model), precision)
        for _ in sys.stdin:
            begin = time.perf_counter()
            passes = step(rows)
            seconds = time.perf_counter() - begin
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(
                json.dumps({"seconds": seconds, "passes": passes, "peak_bytes": peak}), flush=True
            )


def token_rows() -> np.ndarray:
    """Rows of random tokens."""
    return np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (ROWS, LENGTH + 1))


def masked_rows() -> Any:
    """Samples of random tokens: one of four is short, as documents end; 15 % are masked."""
    from tokamake.train.objectives.masked.rows import MaskedRows

    generator = np.random.default_rng(0)
    tokens = generator.integers(1, BERT["vocab_size"], (ROWS, LENGTH))
    lengths = np.full(ROWS, LENGTH)
    lengths[-1] = LENGTH // 2
    padding_mask = np.arange(LENGTH) < lengths[:, None]
    is_masked = padding_mask & (generator.random(tokens.shape) < 0.15)
    types = padding_mask & (np.arange(LENGTH) >= lengths[:, None] // 2)
    labels = np.where(is_masked, tokens, -100)
    orders = generator.integers(0, 2, ROWS)
    inputs = np.where(padding_mask & ~is_masked, tokens, 0)
    return MaskedRows(inputs, types.astype(np.int64), labels, padding_mask, orders)


def causal(model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A model, and the mean cross entropy of its next tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    def loss(rows: np.ndarray) -> Any:
        tokens = torch.from_numpy(rows)
        logits = model(tokens[:, :-1])
        logits = getattr(logits, "logits", logits)
        return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, loss


def transformers_bert(*, of_masked: bool) -> tuple[Any, Callable[[Any], Any]]:
    """The BERT of Megatron in transformers, and its loss of masked tokens and of the order.

    Args:
        of_masked: compute logits of masked tokens alone.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import MegatronBertConfig, MegatronBertForPreTraining

    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = MegatronBertForPreTraining(MegatronBertConfig(**BERT, **rates))

    def loss(rows: Any) -> Any:
        tokens, types, labels, padding_mask, orders = map(torch.from_numpy, rows)
        if of_masked:
            states, pooled = model.bert(tokens, padding_mask.long(), types, return_dict=False)
            is_masked = labels != -100
            logits = model.cls.predictions(states[is_masked]).float()
            of_order = cross_entropy(model.cls.seq_relationship(pooled).float(), orders)
            return cross_entropy(logits, labels[is_masked]) + of_order
        return model(
            input_ids=tokens,
            token_type_ids=types,
            attention_mask=padding_mask.long(),
            labels=labels,
            next_sentence_label=orders,
        ).loss

    return model, loss


def transformers_model(folder: Path, name: str) -> Any:
    """The model of transformers; the name says how it computes experts."""
    from transformers import AutoModelForCausalLM

    own = {"experts_implementation": name.partition("-")[2].replace("grouped", "grouped_mm")}
    model = AutoModelForCausalLM.from_pretrained(
        folder / "hf", dtype="float32", **{key: value for key, value in own.items() if value}
    )
    model.config.use_cache = False
    return model


def litgpt_model() -> Any:
    """The model of litgpt with the same shape."""
    from litgpt import GPT, Config  # type: ignore[import-not-found, unused-ignore]

    return GPT(
        Config(
            block_size=LENGTH,
            padded_vocab_size=SHAPE["vocab_size"],
            n_layer=SHAPE["num_hidden_layers"],
            n_head=SHAPE["num_attention_heads"],
            n_query_groups=SHAPE["num_key_value_heads"],
            n_embd=SHAPE["hidden_size"],
            intermediate_size=SHAPE["intermediate_size"],
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )


def plain_step(model: Any, loss_of: Callable[[Any], Any], precision: str) -> Step:
    """A plain training step with torch's fused AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(rows: Any) -> float:
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    return step


def architecture(family: str) -> Any:
    """Shape of the trainer's model."""
    from tokamake.config.architecture import Architecture

    if family != "bert":
        return Architecture.model_validate({"family": family, **SHAPE, **OWN.get(family, {})})
    heads = {"num_key_value_heads": BERT["num_attention_heads"]}
    return Architecture.model_validate({"family": family, **BERT, **heads})


def write_start(folder: Path, family: str) -> None:
    """Write the checkpoint that the trainer starts from."""
    from tokamake.checkpoint import writer
    from tokamake.checkpoint.random_source import RandomSource
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target

    shape = architecture(family)
    source = Checkpoint("hf", folder, shape, RandomSource(shape, seed=0))
    writer.write(folder / "start", source, "native", Target(), workers=1)
    if family != "bert":
        writer.write(folder / "hf", source, "hf", Target(), workers=1)


def tokamake_step(family: str, precision: str, folder: Path, stack: ExitStack) -> Step:
    """A step of the trainer's engine; its passes and its optimizer are timed separately."""
    from tokamake.config.resolved_run import Run
    from tokamake.runtime.process_group import process_group
    from tokamake.runtime.ranks import Ranks
    from tokamake.train.backends.native import Engine

    train: dict[str, Any] = {
        **{"sequence_length": LENGTH, "micro_batch_size": ROWS, "global_batch_size": ROWS},
        **{"train_steps": 1000, "precision": precision},
        "objective": "masked" if family == "bert" else "causal",
    }
    if architecture(family).has_routers:  # the peers' loop has no balance loss either
        train["router"] = {"balance_coefficient": 0.0}
    run = Run(
        run="benchmark",
        seed=0,
        checkpoint=folder / "start",
        index=folder,
        data_root=folder,
        output=folder / "output",
        architecture=architecture(family),
        train=train,
    )
    ranks = Ranks(0, 1, 0, 1)
    stack.enter_context(process_group(ranks))
    import torch

    engine: Any = Engine(run, ranks, device=torch.device("cpu"))
    spent = [0.0]
    timed(engine.stages, "forward_backward", spent)
    timed(engine.optimizer, "step", spent)

    def step(rows: Any) -> float:
        spent[0] = 0.0
        engine.train_step([rows], learning_rate=1e-4, weight_decay=0.01)
        return spent[0]

    return step


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Replace a method by one that adds the seconds of each call to `spent[0]`."""
    method = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            spent[0] += time.perf_counter() - begin

    setattr(owner, name, call)


if __name__ == "__main__":
    main()
