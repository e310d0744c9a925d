"""Sentences about a run: its shape, recipe, losses, and best checkpoint."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.config.resolved_run import Run

if TYPE_CHECKING:
    import pandas as pd


def shape_of(run: Run) -> str:
    """Shape of the model in a line."""
    shape = run.architecture
    return (
        f"{shape.family}: {shape.num_hidden_layers} layers, width {shape.hidden_size:,}, "
        f"MLP {shape.intermediate_size:,}, {shape.num_attention_heads} query and "
        f"{shape.num_key_value_heads} key-value heads, vocabulary {shape.vocab_size:,}"
        f"{', tied embeddings' if shape.tie_word_embeddings else ''}"
    )


def recipe_of(run: Run) -> str:
    """Steps, batch, optimizer, schedule and precision in a line."""
    train = run.train
    ramp = train.rampup_batch_size
    batch = f"{f'{ramp[0]:,} to ' if ramp else ''}{train.global_batch_size:,}"
    return (
        f"{train.train_steps:,} steps of {batch} × {train.sequence_length:,} "
        f"tokens, {train.optimizer.name}, {train.schedule.name} schedule, "
        f"{train.precision or 'bf16 on GPUs, fp32 on CPUs'}, ZeRO stage {train.zero_stage}"
    )


def start_of(run: Run) -> list[tuple[str, str]]:
    """Initial checkpoint of the run, if its weights were not random."""
    finetune = run.train.finetune
    if finetune is None:
        return []
    mode = "weights alone" if finetune else f"continued at step {run.step:,}"
    if not run.train.load_optimizer:
        mode += " with a new optimizer"
    parent = f"run {run.parent}: " if run.parent else ""
    return [("start", f"{parent}{run.checkpoint}, {mode}")]


def unit_of(run: Run) -> str:
    """Unit of the run's losses."""
    if run.architecture.has_towers:
        return "nats per query"
    # The loss of the order of sentences is a mean over samples.
    return "nats, tokens and order" if run.architecture.has_sample_head else "nats per token"


def losses_of(trained: dict[str, Any], run: Run) -> list[tuple[str, str]]:
    """Names and values of the losses at the end of training."""
    unit = unit_of(run)
    first, last = trained["first_loss"], trained["last_loss"]
    measurements, losses = trained["validation_losses"], []
    if last is not None:
        text = f"{last:.4f} {unit} at the last logged step, {first:.4f} at the first"
        losses.append(("training loss", text))
    for key, loss in measurements[-1].items() if measurements else ():
        if key != "step":
            kind, _, name = key.replace("_", " ").partition("/")
            value = f"{loss:.4f} {unit}" if kind.endswith("loss") else f"{loss:.1%}"
            losses.append((f"{kind} ({name})" if name else kind, value))
    return losses


def best_checkpoint(history: "pd.DataFrame", last: Path) -> Path:
    """The kept checkpoint with the lowest validation loss; `last` if none was validated."""
    from tokamake.report.page.series import measured

    splits = measured(history, "validation_loss")
    steps, losses = splits.get("") or next(iter(splits.values()), ((), ()))
    loss_of = {
        last.with_name(f"global_step{int(step)}"): loss
        for step, loss in zip(steps, losses, strict=True)
        if math.isfinite(loss)
    }
    kept = [folder for folder in loss_of if folder.is_dir()]
    # If losses are equal, the later step counts.
    return min(reversed(kept), key=lambda folder: loss_of[folder], default=last)
