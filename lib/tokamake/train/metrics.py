"""What a run measures: JSON lines for programs, TensorBoard events, a line for the console.

Records come from the loop on rank 0; metrics.jsonl goes to plots and to train.json. After a restart
no line of a step that has to be done again is left.
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


def read(path: Path) -> list[Record]:
    """Read metrics.jsonl; a torn last line, as a killed process leaves it, is not taken."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


class Metrics:
    """Writer of `folder`/metrics.jsonl and `folder`/tensorboard.

    Args:
        folder: output folder of the run.
        done: steps finished in the checkpoint that training continues from; records of later steps
            are dropped, and with 0 all are.
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
        """Write one record: `step` and what was measured; `sync` says if that fails."""
        try:
            self._stream.write(_line(record))
            self._stream.flush()
            for name, value in record.items():
                if name != "step":
                    self._events.add_scalar(name, value, int(record["step"]))
        except OSError as error:
            self._failure = self._failure or error

    def sync(self) -> None:
        """Bring all records to disk: before a checkpoint, lest it outlive them.

        Raises:
            OSError: some are not, of this call or of those before.
        """
        if self._failure:
            raise self._failure
        os.fsync(self._stream.fileno())
        self._events.flush()

    def close(self) -> None:
        """Finish both files; what is not on disk then has been told by `sync`, or is lost."""
        with suppress(OSError):
            self.sync()
        with suppress(OSError):
            self._stream.close()
            self._events.close()


def validation(losses: dict[str, float]) -> Record:
    """Losses of validation sets as entries of a record: `valid` is validation_loss itself."""
    return {
        "validation_loss" + f"/{name}" * (name != "valid"): loss for name, loss in losses.items()
    }


def model_flops_per_token(run: Run) -> int:
    """Floating-point operations that the model needs for a token, forward and backward."""
    family = plugins.load("models/*/model", run.architecture.family)
    flops: int = family.num_flops_per_token(run.architecture, run.train.sequence_length)
    return flops


def title(name: str) -> str:
    """What the loss of a validation set is called, for people."""
    return "validation loss" + f" ({name})" * (name != "valid")


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def console_line(record: Record, *, train_steps: int, seconds_left: float) -> str:
    """A training record for people, in the order of Megatron's log line."""
    norm = record.get("grad_norm")
    told = "skipped: gradients overflow" if norm is None else f"grad norm {norm:.3f}"
    return (
        f"step {record['step']}/{train_steps} | loss {record['loss']:.4f} | "
        f"lr {record['learning_rate']:.2e} | {told} | "
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
