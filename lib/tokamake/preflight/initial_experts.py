"""A mixture of experts that starts from a dense model's checkpoint: upcycling (arXiv 2410.07524).

The MLP of a layer is cut into slices as wide as an expert, and experts are copies of the slices.
The router has the same row for all slices of a copy, so a token uses whole copies of the MLP. The
experts' results add up to the dense MLP's if the token's weights add up to 1 and the last
projections are multiplied by the number of slices. So the model begins with the dense model's loss.
"""

from collections.abc import Iterator
from typing import NamedTuple

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.families import FAMILIES
from tokamake.errors import UserError, divisor

_OF_EXPERTS = {
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
}
_MAY_DIFFER = {"family", "initializer_range", "intermediate_size", *_OF_EXPERTS}
"""Fields that decide nothing about the parts that both models have."""


class Upcycling(NamedTuple):
    """How the experts of a layer come from a dense MLP: expert e is slice e % slices."""

    slices: int
    """Parts of the MLP, each as wide as an expert."""
    copies: int
    """Experts with the same slice."""


def upcycling(start: Architecture, architecture: Architecture) -> Upcycling:
    slices = start.intermediate_size // architecture.expert_size
    return Upcycling(slices, architecture.setting("num_experts") // slices)


def dense_families(architecture: Architecture) -> tuple[str, ...]:
    """Families whose checkpoints can start a model's experts."""
    families: tuple[str, ...] = plugins.constant(
        FAMILIES, architecture.family, "DENSE_FAMILIES", default=()
    )
    return families


def starts_experts(start: Architecture, architecture: Architecture) -> bool:
    """Whether a dense checkpoint of this architecture starts a model's experts."""
    return start.family in dense_families(architecture)


def upcycled_architecture(
    start: Architecture, wanted: Architecture, *, source: object, stated: object
) -> Architecture:
    """Architecture of a model whose experts start from a dense MLP; all else must be equal.

    Args:
        source: the checkpoint, for messages.
        stated: file of the architecture with experts, for messages.
    """
    # A family without a setting computes as the other one with the setting off: 0, false or empty.
    expected, values = dict(wanted), dict(start)
    names = [name for name in {**expected, **values} if name not in _MAY_DIFFER]
    if wanted.vocab_size is None:  # the tokenizer decides
        names.remove("vocab_size")
    lines = [
        f"{name}: checkpoint {values.get(name)}, config {expected.get(name)}"
        for name in names
        if (expected.get(name) or None) != (values.get(name) or None)
    ]
    if lines:
        raise UserError(
            f"{source}: a {start.family} with other settings than {stated} ({'; '.join(lines)}); "
            "change these fields, or name another checkpoint"
        )
    if problem := next(_problems(start, wanted), None):
        raise UserError(f"{source}: cannot start the experts of {stated}: {problem}")
    return wanted.model_copy(update={"vocab_size": start.vocab_size})


def _problems(start: Architecture, wanted: Architecture) -> Iterator[str]:
    """Reasons why the experts would not add up to the dense MLP."""
    width, inner = wanted.expert_size, start.intermediate_size
    if inner % width:
        own = "moe_intermediate_size" in dict(wanted)
        yield (
            f"{'moe_' * own}intermediate_size: {width}: the checkpoint's intermediate_size {inner} "
            f"is not a multiple of it; give {divisor(inner)}"
        )
        return
    slices = inner // width
    for name in ("num_experts", "num_experts_per_tok"):
        if (number := wanted.setting(name)) % slices:
            yield (
                f"{name}: {number}: experts are {slices} slices of the MLP, and a token needs all "
                f"of them; give a multiple of {slices}"
            )
    if not wanted.setting("norm_topk_prob"):
        yield (
            "norm_topk_prob: false: the weights of a token's experts would not add up to 1; set "
            "it to true"
        )


def upcycling_note(start: Architecture, architecture: Architecture, *, source: object) -> str:
    """A line that says how the dense MLPs become experts."""
    slices, copies = upcycling(start, architecture)
    parts = f"{slices} slices of the MLP" if slices > 1 else "the MLP"
    return (
        f"{source}: its {start.family} starts the experts: each layer has {copies} copies of "
        f"{parts}, and a new router"
    )
