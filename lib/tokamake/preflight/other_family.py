"""Runs that start from a checkpoint of another family: towers of an encoder, experts of an MLP."""

from collections.abc import Callable
from typing import NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight import initial_experts, initial_towers
from tokamake.preflight.initial_experts import dense_families


class _Start(NamedTuple):
    """One way to start; all functions take the checkpoint's architecture and the run's."""

    applies: Callable[[Architecture, Architecture], bool]
    architecture: Callable[..., Architecture]
    note: Callable[..., str]


_STARTS = (
    _Start(
        initial_towers.starts_towers, initial_towers.tower_architecture, initial_towers.tower_note
    ),
    _Start(
        initial_experts.starts_experts,
        initial_experts.upcycled_architecture,
        initial_experts.upcycling_note,
    ),
)


def _way(start: Architecture, wanted: Architecture) -> _Start | None:
    return next((each for each in _STARTS if each.applies(start, wanted)), None)


def architecture_from(
    start: Architecture, wanted: Architecture, *, source: object, stated: object
) -> Architecture | None:
    """Architecture of a run that starts from another family; None: this family starts no such run.

    Args:
        source: the checkpoint, for messages.
        stated: file of the run's architecture, for messages.
    """
    way = _way(start, wanted)
    return way.architecture(start, wanted, source=source, stated=stated) if way else None


def check_weights_alone(
    start: Architecture, architecture: Architecture, *, train: TrainSettings, source: object
) -> None:
    """Refuse to continue the training of a model of another family."""
    if train.finetune is False and _way(start, architecture):
        raise UserError(
            f"{source}: a {start.family} gives a {architecture.family} its weights alone, and "
            "train.finetune is false; set it to true"
        )


def start_note(start: Architecture, architecture: Architecture, *, source: object) -> str:
    """A line that says how weights of another family are used; empty: the family is the same."""
    way = _way(start, architecture)
    return way.note(start, architecture, source=source) if way else ""


def other_starts(architecture: Architecture) -> str:
    """Families of checkpoints that can start a model, beside its own, as a remedy."""
    if architecture.has_towers:
        return "a bert for its towers"
    if families := dense_families(architecture):
        return f"a {' or '.join(families)} for its experts"
    return "another checkpoint"
