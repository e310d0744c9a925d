"""Metrics of a run (metrics.jsonl) as arrays over steps.

The trainer writes the lines: training steps have the key `loss`, measurements `validation_loss`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError

Floats = npt.NDArray[np.float64]
_TRAINING = ("step", "loss", "learning_rate", "tokens_per_second", "consumed_tokens")
_VALIDATION, _CORPUS = "validation_loss", "loss"
_ACCURACIES = {
    "validation_token_accuracy": "tokens",
    "validation_sample_accuracy": "order of sentences",
}
"""Predictions of an encoder, by the key of their accuracy."""


class MetricsHistory(NamedTuple):
    """Training and validation lines as arrays (lines,) in step order."""

    training: dict[str, Floats]
    """step, loss (nats per token), learning_rate, tokens_per_second, consumed_tokens."""
    validation: dict[str, tuple[Floats, Floats]]
    """Steps and losses (nats per token) of each validation split."""
    corpora: dict[str, tuple[Floats, Floats]]
    """Steps and training losses of each corpus, if `train.log_corpus_losses` records them."""
    accuracies: dict[str, tuple[Floats, Floats]]
    """Steps and shares of right predictions, by what an encoder predicts and validation split."""


def read_history(path: Path) -> MetricsHistory:
    """Read metrics. If a step occurs twice, because of a restart, the last line counts."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make it with `tokamake train`") from None
    training: dict[int, list[float]] = {}
    validation: dict[str, dict[int, list[float]]] = {}
    corpora: dict[str, dict[int, list[float]]] = {}
    accuracies: dict[str, dict[int, list[float]]] = {}
    for number, text in enumerate(lines, 1):
        line = _parse(text, f"{path}:{number}")
        if _TRAINING[1] in line:
            training[line["step"]] = _pick(line, _TRAINING, where=f"{path}:{number}")
        for key in line:
            kind, _, name = key.partition("/")
            if kind == _VALIDATION or (kind == _CORPUS and name):
                lines_of = validation if kind == _VALIDATION else corpora
                rows = lines_of.setdefault(name or "valid", {})
                rows[line["step"]] = _pick(line, ("step", key), where=f"{path}:{number}")
            elif kind in _ACCURACIES:
                rows = accuracies.setdefault(_ACCURACIES[kind] + f" ({name})" * bool(name), {})
                rows[line["step"]] = _pick(line, ("step", key), where=f"{path}:{number}")
    if not training:
        raise UserError(f"{path}: no training step; run `tokamake train` again")
    return MetricsHistory(
        dict(zip(_TRAINING, _columns(training), strict=True)),
        *(
            {name: tuple(_columns(rows)) for name, rows in lines_of.items()}
            for lines_of in (validation, corpora, accuracies)
        ),
    )


def best_checkpoint(history: MetricsHistory, last: Path) -> Path:
    """The kept checkpoint with the lowest validation loss; `last` if none was validated."""
    splits = history.validation
    steps, losses = splits.get("valid") or next(iter(splits.values()), ((), ()))
    measured = {
        last.with_name(f"global_step{int(step)}"): loss
        for step, loss in zip(steps, losses, strict=True)
        if np.isfinite(loss)
    }
    kept = [folder for folder in measured if folder.is_dir()]
    # Of equal losses, the later step's.
    return min(reversed(kept), key=lambda folder: measured[folder], default=last)


def smooth(values: Floats) -> Floats:
    """Centred running mean (n,) over about a twentieth of the values.

    The window is narrow at the start, where losses fall too fast to average over later values. At
    the end, it has no right half.
    """
    half_width, length = max(1, len(values) // 40), len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(length)
    half = np.minimum(places, half_width)
    starts, ends = places - half, np.minimum(places + half + 1, length)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); remove the line") from None
    if not isinstance(line, dict) or "step" not in line:
        raise UserError(f"{where}: no key 'step'; remove the line")
    return line


def _pick(line: dict[str, Any], keys: tuple[str, ...], *, where: str) -> list[float]:
    for key in keys:
        if not isinstance(line.get(key), int | float):
            raise UserError(f"{where}: {key} is {line.get(key)!r}, not a number; remove the line")
    return [float(line[key]) for key in keys]


def _columns(rows: dict[int, list[float]]) -> Floats:
    return np.array([rows[step] for step in sorted(rows)]).T
