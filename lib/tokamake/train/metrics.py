"""Metrics of a run: JSON lines for programs, TensorBoard events, lines for people.

`summary` and the report read metrics.jsonl.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokamake import files, plugins
from tokamake.config.resolved_run import Run
from tokamake.units import duration

Record = dict[str, int | float]
"""A line of metrics.jsonl: `step`, and what was measured there."""


def read(path: Path) -> list[Record]:
    """Read metrics.jsonl; skip an incomplete last line, which a killed process may leave."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in complete.splitlines()]


class Metrics:
    """Writer of `folder`/metrics.jsonl and `folder`/tensorboard.

    Args:
        folder: output folder of the run.
        done: finished steps in the checkpoint that training resumes from; records of later steps
            are dropped, or all records where it is 0.
    """

    def __init__(self, folder: Path, *, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = folder / "metrics.jsonl"
        kept = [record for record in read(self.path) if done and record["step"] <= done]
        files.write_text(self.path, "".join(_line(record) for record in kept))
        self._stream = self.path.open("a", encoding="utf-8")
        self._failure: OSError | None = None
        self._events = SummaryWriter(
            str(folder / "tensorboard"), purge_step=done + 1 if done else 0
        )

    def add(self, record: Record) -> None:
        """Write a record; an error is kept for `sync`, which all ranks wait for."""
        try:
            self._stream.write(_line(record))
            self._stream.flush()
            for name, value in record.items():
                if name != "step":
                    self._events.add_scalar(name, value, int(record["step"]))
        except OSError as error:
            self._failure = self._failure or error

    def sync(self) -> None:
        """Bring all records to disk; a checkpoint must not outlive the records before it.

        Raises:
            OSError: a record could not be written, now or earlier.
        """
        if self._failure:
            raise self._failure
        os.fsync(self._stream.fileno())
        self._events.flush()

    def close(self) -> None:
        """Close both files; errors were reported by `sync`, or concern records after it."""
        with suppress(OSError):
            self.sync()
        with suppress(OSError):
            self._stream.close()
            self._events.close()


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def model_flops_per_token(run: Run) -> int:
    """Floating-point operations that the model needs for a token, forward and backward."""
    family = plugins.load("models/*/memory", run.architecture.family)
    flops: int = family.flops_per_token(run.architecture, run.train.sequence_length)
    return flops


def validation(losses: dict[str, float]) -> Record:
    """Entries of a record for the losses of validation sets; that of `valid` has no suffix."""
    return {
        "validation_loss" + f"/{name}" * (name != "valid"): loss for name, loss in losses.items()
    }


def title(name: str) -> str:
    """Name of a validation set's loss in lines for people."""
    return "validation loss" + f" ({name})" * (name != "valid")


def console_line(record: Record, *, train_steps: int, seconds_left: float) -> str:
    """A training record as a line for people, in the order of Megatron's log line."""
    norm = record.get("grad_norm")
    norm_text = "skipped: gradients overflow" if norm is None else f"grad norm {norm:.3f}"
    return (
        f"step {record['step']}/{train_steps} | loss {record['loss']:.4f} | "
        f"lr {record['learning_rate']:.2e} | {norm_text} | "
        f"{record['tokens_per_second']:,.0f} tokens/s | {duration(seconds_left)} left"
    )


def summary(records: list[Record]) -> dict[str, Any]:
    """First and last training loss and all validation losses."""
    losses = [record["loss"] for record in records if "loss" in record]
    return {
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "validation_losses": [
            record for record in records if any(key.startswith("validation_loss") for key in record)
        ],
    }
