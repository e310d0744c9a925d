"""Model FLOPs utilization (MFU) of a Llama of 1.2 billion parameters on one GPU.

    python benchmarks/mfu.py --work DIR

Makes random weights of the shape of Llama 3.2 1B and measures training steps in bf16 with
`tokamake benchmark-train`, each variant in a process of its own, on random tokens. FLOPs are those
of PaLM's definition, the peak is that of the data sheet. The peer is the Llama of transformers with
autocast to bf16 and torch's fused AdamW, in micro batches of the same size.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SHAPE = {
    "family": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LENGTH = 4096
SAMPLES = 16
"""Samples of a step."""
VARIANTS: dict[str, dict[str, Any]] = {
    "native, 2 samples": {"micro_batch_size": 2},
    "native, 4 samples": {"micro_batch_size": 4},
    "native, 2 samples, compiled": {"micro_batch_size": 2, "compile": True},
    "native, 4 samples, compiled": {"micro_batch_size": 4, "compile": True},
    "deepspeed ZeRO 1, 2 samples": {"micro_batch_size": 2, "backend": "deepspeed"},
    "transformers, 4 samples": {"micro_batch_size": 4, "peer": True},
    "transformers, 4 samples, compiled": {"micro_batch_size": 4, "compile": True, "peer": True},
}


def main() -> None:
    """Measure the variants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for weights and runs")
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--only", default="", help="variants whose names contain this text")
    parser.add_argument("--peer", help="internal: settings of the peer")
    options = parser.parse_args()
    if options.peer:
        measure_transformers(options.work / "speed.json", options.steps, **json.loads(options.peer))
        return
    start = options.work / "start"
    if not start.exists():
        write_start(start)
    print("| | tokens/s | TFLOP/s | MFU | step s | peak GB |\n|---|---|---|---|---|---|")
    for name, settings in VARIANTS.items():
        if options.only in name:
            print(f"| {name} |", row(options.work, name, settings, options.steps), flush=True)


def write_start(folder: Path) -> None:
    """Write random weights as a checkpoint that a run starts from."""
    from tokamake.checkpoint import writer
    from tokamake.checkpoint.random_source import RandomSource
    from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
    from tokamake.config.architecture import Architecture

    shape = Architecture.model_validate(SHAPE)
    source = Checkpoint("hf", folder, shape, RandomSource(shape, seed=0))
    writer.write(folder, source, "native", Target(), workers=1)


def row(work: Path, name: str, settings: dict[str, Any], steps: int) -> str:
    """Measure a variant; return its cells of the table."""
    output = work / "speed.json"
    output.unlink(missing_ok=True)
    if "peer" in settings:
        command = [sys.executable, __file__, "--work", str(work), "--peer", json.dumps(settings)]
    else:
        command = [sys.executable, "-m", "tokamake", "benchmark-train", "--synthetic"]
        command += ["--config", str(write_config(work, settings)), "--output", str(output)]
    command += ["--steps", str(steps)]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (work / f"{name.replace(' ', '-')}.log").write_text(process.stdout)
    if not output.exists():
        return process.stdout.strip().rpartition("\n")[2]
    speed = json.loads(output.read_text())
    return (
        f"{speed['tokens_per_second']:,.0f} | {speed['model_tflops_per_rank']:.0f} | "
        f"{speed['mfu']:.1%} | {speed['step_seconds']['median']:.3f} | "
        f"{speed['peak_memory_bytes'] / 1e9:.1f} |"
    )


def write_config(work: Path, settings: dict[str, Any]) -> Path:
    """Write run.yaml."""
    from tokamake.config.architecture import Architecture
    from tokamake.config.resolved_run import Run, write_run

    train = {"sequence_length": LENGTH, "global_batch_size": SAMPLES, "train_steps": 1000}
    run = Run(
        run="mfu",
        seed=0,
        checkpoint=work / "start",
        index=work,
        data_root=work,
        output=work / "output",
        architecture=Architecture.model_validate(SHAPE),
        train={**train, **settings},
    )
    write_run(work / "run.yaml", run)
    return work / "run.yaml"


def measure_transformers(
    output: Path, steps: int, *, micro_batch_size: int, compile: bool = False, peer: bool
) -> None:
    """Train transformers' Llama; write the numbers that `tokamake benchmark-train` does."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tokamake.config.architecture import Architecture
    from tokamake.models.common.costs import flops_per_token
    from tokamake.train.trials.speed import known_peak

    shape = {name: value for name, value in SHAPE.items() if name != "family"}
    config = LlamaConfig(**shape, attn_implementation="sdpa", use_cache=False)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config)
    if compile:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    accumulated = SAMPLES // micro_batch_size

    def step() -> None:
        for _ in range(accumulated):
            tokens = torch.randint(SHAPE["vocab_size"], (micro_batch_size, LENGTH + 1)).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens[:, :-1]).logits
            labels = tokens[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels)
            (loss / accumulated).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    times = []
    for _ in range(5 + steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    tokens_per_second = SAMPLES * LENGTH * steps / sum(times[5:])
    flops = flops_per_token(Architecture.model_validate(SHAPE), LENGTH, num_mlp_matrices=3)
    tflops, peak = (
        tokens_per_second * flops / 1e12,
        known_peak(torch.cuda.get_device_name(), "bf16"),
    )
    assert peak is not None
    speed = {
        "tokens_per_second": tokens_per_second,
        "model_tflops_per_rank": tflops,
        "mfu": tflops / peak,
        "step_seconds": {"median": median(times[5:])},
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }
    output.write_text(json.dumps(speed))


if __name__ == "__main__":
    main()
