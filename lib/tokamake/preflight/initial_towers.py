"""A biencoder that starts from an encoder's checkpoint: each tower gets the encoder's weights."""

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

_OF_MODEL = {"family", "initializer_range"}
"""Fields that both have, and that may differ."""


def starts_towers(start: Architecture, architecture: Architecture) -> bool:
    """Whether a checkpoint of this architecture starts a model with towers of its family."""
    if not architecture.has_towers:
        return False
    encoder: str = plugins.load("models/*/hf", architecture.family).ENCODER_FAMILY
    return start.family == encoder


def tower_architecture(
    start: Architecture, wanted: Architecture, *, source: object, stated: object
) -> Architecture:
    """Architecture of a biencoder whose towers start from an encoder; they must have its sizes.

    Args:
        source: the checkpoint, for messages.
        stated: file of the biencoder's architecture, for messages.
    """
    expected, values = wanted.model_dump(), start.model_dump()
    names = [name for name in expected if name in values and name not in _OF_MODEL]
    if wanted.vocab_size is None:  # the tokenizer decides
        names.remove("vocab_size")
    lines = [
        f"{name}: checkpoint {values[name]}, config {expected[name]}"
        for name in names
        if expected[name] != values[name]
    ]
    if lines:
        raise UserError(
            f"{source}: a {start.family} of other sizes than the towers in {stated} "
            f"({'; '.join(lines)}); change these fields, or name another checkpoint"
        )
    return wanted.model_copy(update={"vocab_size": start.vocab_size})


def initial_names(architecture: Architecture) -> dict[str, str]:
    """Name, in the encoder's checkpoint, of each tensor of a model with towers.

    Tensors that the encoder lacks are drawn under these names, so that all towers get the same.
    """
    towers = plugins.load("models/*/hf", architecture.family).towers(architecture)
    prefixes = tuple(f"model.{name}." for name in towers)
    return {
        name: f"model.{name.removeprefix(prefix)}"
        for name in model_tensors.shapes(architecture)
        for prefix in prefixes
        if name.startswith(prefix)
    }


def tower_note(start: Architecture, architecture: Architecture, *, source: object) -> str:
    """A line that names dropped tensors of the encoder and new tensors of the towers."""
    stored, needed = {*model_tensors.shapes(start)}, {*initial_names(architecture).values()}
    parts = [f"{source}: its {start.family} starts each tower"]
    for text, names in (("without", stored - needed), ("with a new", needed - stored)):
        modules = sorted({name.split(".")[1] for name in names})
        parts += [f"{text} {', '.join(modules)}"] if modules else []
    return ", ".join(parts)
