"""Metrics of a run: JSON lines for programs, TensorBoard events, lines for people.

`summary` and the report read metrics.jsonl.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake import files, plugins
from tokamake.config.objective import objective_data
from tokamake.config.resolved_run import Run, sample_lengths
from tokamake.runtime.console import counted
from tokamake.units import duration

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Record = dict[str, Any]
"""A line of metrics.jsonl: `step`, and numbers that were measured there; None: no token had a
label."""
Scalars = dict[tuple[str, int], int | float]
"""Value of each TensorBoard tag at a step."""


class Validation(NamedTuple):
    """A measurement of a validation split; the same on all ranks."""

    loss: float | None
    """Mean over the tokens, plus the mean over the samples of their own loss; None: no token and no
    sample has a label."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Means that the objective measures, such as token_accuracy: share of the tokens with a label
    that the model predicts."""


class TextSample(NamedTuple):
    """A prompt, and its continuation by the model at a step."""

    corpus: str
    """Corpus of the prompt; empty if the config states the prompt."""
    prompt: str
    text: str
    """The continuation."""


ACCURACY_AT = "accuracy_at_"
"""Beginning of the names of metrics about the best k, before k."""

FILE = "metrics.jsonl"
"""Name of the file in the output folder of a run."""


def parse(lines: bytes, *, with_null: bool = False) -> tuple[list[Record], int]:
    """Parse lines of metrics.jsonl, except for an incomplete last one, which may still grow.

    Args:
        with_null: keep values that were not measured.

    Returns:
        Records, and the number of damaged lines. A crash of the machine may leave half a line, or
        NUL bytes, before later lines.
    """
    complete = lines[: lines.rfind(b"\n") + 1].splitlines()
    records = [record for line in complete if (record := _parse(line)) is not None]
    kept = records if with_null else [*map(measured, records)]
    return kept, len(complete) - len(records)


def measured(record: Mapping[str, Any]) -> Record:
    """A record without values that were not measured: the loss of tokens without labels."""
    return {name: value for name, value in record.items() if value is not None}


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line.strip(b"\0"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def read(path: Path) -> list[Record]:
    """Read the records of metrics.jsonl, without damaged lines; none if there is no file."""
    return parse(path.read_bytes())[0] if path.is_file() else []


def record_scalars(record: Record) -> Scalars:
    """Return the entries of a record as values of TensorBoard tags."""
    step = int(record["step"])
    return {(name, step): value for name, value in record.items() if name != "step"}


class RecordFile:
    """JSON lines; `keeps` says which records of an earlier job stay."""

    def __init__(self, path: Path, keeps: Callable[[Any], bool]) -> None:
        records, num_damaged = (
            parse(path.read_bytes(), with_null=True) if path.is_file() else ([], 0)
        )
        self.kept = [record for record in records if keeps(record)]
        if num_damaged and (self.kept or not records):
            print(f"{path}: left out {counted(num_damaged, 'damaged line')}", flush=True)
        files.write_text(path, "".join(map(_line, self.kept)))
        # Unbuffered: a write tells how many bytes a full disk has taken.
        self._stream = path.open("ab", buffering=0)
        self._pending = b""

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record; if the disk is full, a later call writes the rest."""
        self._pending += _line(record).encode()
        with suppress(OSError):  # `sync` raises it, which all ranks wait for
            self._write()

    def sync(self) -> None:
        """Bring all records to disk."""
        self._write()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file; errors were reported by `sync`, or concern records after it."""
        with suppress(OSError):
            self.sync()
        with suppress(OSError):
            self._stream.close()

    def _write(self) -> None:
        while self._pending:
            self._pending = self._pending[self._stream.write(self._pending) :]


class Metrics:
    """Writer of `folder`/metrics.jsonl and `folder`/tensorboard.

    Attributes:
        has_records: whether records of earlier jobs stay.

    Args:
        done: finished steps in the checkpoint that training resumes from; records of later steps
            are dropped, or all records where it is 0.
        scalars: function that returns the value of each TensorBoard tag and step.
    """

    def __init__(
        self, folder: Path, *, done: int, scalars: Callable[[Record], Scalars] = record_scalars
    ) -> None:
        self.path = folder / FILE
        self._file = RecordFile(self.path, lambda record: 0 < done >= record["step"])
        self.has_records = bool(self._file.kept)
        self._unsynced = list[Record]()
        self._scalars = scalars
        self._folder = folder / "tensorboard"
        self._events = self._open_events(done + 1 if done else 0)

    def add(self, record: Record) -> None:
        """Write a record; if the disk is full, a later call writes the rest."""
        self._file.add(record)
        self._unsynced.append(record := measured(record))
        with suppress(OSError):
            self._add_event(record)

    def add_texts(self, step: int, texts: Sequence[TextSample]) -> None:
        """Add samples of text as TensorBoard events; samples.jsonl has them, too."""
        with suppress(OSError):
            for number, (_, prompt, text) in enumerate(texts):
                indented = "\n".join(f"    {line}" for line in f"{prompt}{text}".splitlines())
                self._events.add_text(f"samples/{number}", indented, step)

    def sync(self) -> None:
        """Bring all records to disk; a checkpoint must not outlive the records before it."""
        self._file.sync()
        try:
            self._events.flush()
        except OSError:
            self._repeat_events()
        self._unsynced.clear()

    def close(self) -> None:
        """Close both files; errors were reported by `sync`, or concern records after it."""
        with suppress(OSError):
            self.sync()
        self._file.close()
        with suppress(OSError):
            self._events.close()

    def _open_events(self, purge_step: int | None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard would purge by step also where a tag counts samples: Megatron's purge nothing.
        purge_step = purge_step if self._scalars is record_scalars else None
        return SummaryWriter(str(self._folder), purge_step=purge_step)

    def _add_event(self, record: Record) -> None:
        for (tag, step), value in self._scalars(record).items():
            self._events.add_scalar(tag, value, step)

    def _repeat_events(self) -> None:
        """Write events to a new file: TensorBoard's writer never recovers from a full disk."""
        with suppress(OSError):
            self._events.close()
        first = int(self._unsynced[0]["step"]) if self._unsynced else None
        self._events = self._open_events(first)
        for record in self._unsynced:
            self._add_event(record)
        self._events.flush()


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record) + "\n"


def model_flops_per_token(run: Run) -> int:
    """Floating-point operations that the model needs for a token, forward and backward.

    Only tokens with a label need logits.
    """
    shape = run.architecture
    family = plugins.load("models/*/memory", shape.family)
    flops: int = family.flops_per_token(shape, *sample_lengths(run))
    share = objective_data(run.train.objective).labeled_share(run.train)
    if share == 1 or shape.has_towers:
        return flops
    assert shape.vocab_size is not None
    of_logits = 3 * 2 * shape.hidden_size * shape.vocab_size
    return flops - round((1 - share) * of_logits)


def validation(splits: dict[str, Validation]) -> Record:
    """Entries of a record for validation splits; names of the split `valid` have no suffix."""
    return {
        f"validation_{key}" + f"/{name}" * (name != "valid"): value
        for name, each in splits.items()
        for key, value in {"loss": each.loss, **each.metrics}.items()
    }


def validation_text(name: str, split: Validation) -> str:
    """A measurement of a validation split for people."""
    if split.loss is None:
        return f"{title(name)} none: no token of the split has a label"
    text = metrics_text(split.metrics)
    return f"{title(name)} {split.loss:.4f}" + f" ({text})" * bool(text)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Accuracies and other measurements of a validation for people; may be empty."""
    shares, texts = [], []
    for key, value in metrics.items():
        if key.endswith("_accuracy"):
            shares.append(f"{value:.1%} of {key.removesuffix('_accuracy')}s")
        elif key.startswith(ACCURACY_AT):
            texts.append(f"{value:.1%} in the top {key.removeprefix(ACCURACY_AT)}")
        else:
            texts.append(f"{key} {value:.4f}")
    if shares:
        texts.insert(0, f"{', '.join(shares)} right")
    return ", ".join(texts)


def title(name: str) -> str:
    """Name of a validation split's loss in lines for people."""
    return "validation loss" + f" ({name})" * (name != "valid")


def console_line(record: Record, *, train_steps: int, seconds_left: float) -> str:
    """A training record as a line for people, in the order of Megatron's log line."""
    norm = record.get("grad_norm")
    loss = "none (no token of the batch has a label)"
    if record["loss"] is not None:
        loss = f"{record['loss']:.4f}"
    norm_text = "skipped: gradients are not finite" if norm is None else f"grad norm {norm:.3f}"
    return (
        f"step {record['step']}/{train_steps} | loss {loss} | "
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


def validation_losses(path: Path) -> Iterator[tuple[int, float]]:
    """Validation loss at each step: of the split `valid`, or else the mean of all splits."""
    for record in read(path):
        losses = {name: loss for name, loss in record.items() if name.startswith("validation_loss")}
        if losses:
            mean = sum(losses.values()) / len(losses)
            loss = losses.get("validation_loss", mean)
            yield int(record["step"]), loss if math.isfinite(loss) else math.inf
