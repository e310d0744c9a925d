"""Layers of Megatron-DeepSpeed's pipeline, and DeepSpeed's names of their parameters.

Pipeline layers are the embedding, each layer of the model, the last norm, and the output layer.
A parameter is named after the number of its layer, or after the tie of a tied embedding.
"""

from collections.abc import Iterable, Iterator
from itertools import count

from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
)
from tokamake.errors import UserError

_TIED_EMBEDDING = "tied_modules.embed"


def layers(rank: TensorParallelRank) -> Iterator[dict[str, TensorSlice]]:
    """Yield a rank's tensors of each pipeline layer, in order."""
    if rank.heads() or rank.architecture.has_decoder:
        raise UserError(
            f"format: Megatron-DeepSpeed has no pipeline of a {rank.architecture.family}; choose "
            "mds, megatron or another format"
        )
    yield rank.embedding()
    for number in range(rank.architecture.num_hidden_layers):
        yield rank.layer(number)
    yield rank.norm()
    if output := rank.output_layer():
        yield {f"lm_head.{name}": tensor for name, tensor in output.items()}


def parameters(rank: TensorParallelRank, numbers: Iterable[int]) -> dict[str, TensorSlice]:
    """Return a rank's tensors by DeepSpeed's names of parameters."""
    slices: dict[str, TensorSlice] = {}
    for index, (number, tree) in enumerate(zip(numbers, layers(rank), strict=False)):
        # DeepSpeed names a tied layer after the tie, not after its number.
        is_tied = index == 0 and rank.architecture.tie_word_embeddings
        prefix = _TIED_EMBEDDING if is_tied else f"{number}"
        slices |= {f"{prefix}.{name}": tensor for name, tensor in tree.items()}
    return slices


def layer_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the pipeline layers of parameters; empty if there is no pipeline.

    A tied embedding has no number in its name, and is first.
    """
    prefixes = {name.partition(".")[0] for name in names}
    tied = [0] if _TIED_EMBEDDING.partition(".")[0] in prefixes else []
    return [*tied, *sorted(int(prefix) for prefix in prefixes if prefix.isdecimal())]


def stage_parameters(
    rank: TensorParallelRank, stage: int, *, stages: int
) -> dict[str, TensorSlice]:
    """Return the tensors of a stage in the order of its model, by their names in written files.

    DeepSpeed's `type:transformer` partition gives each stage the same number of layers. If that
    is not possible, the first stages get one more. The first stage also has the layers before
    them, and the last stage the layers after them.
    """
    num_layers = rank.architecture.num_hidden_layers
    per_stage, num_longer = divmod(num_layers, stages)
    # Number 1 is the embedding, layers follow from 2.
    begin, end = (2 + at * per_stage + min(at, num_longer) for at in (stage, stage + 1))
    numbers = range(begin if stage else 1, end if stage < stages - 1 else num_layers + 4)
    slices: dict[str, TensorSlice] = {}
    for name, tensor in parameters(rank, count(1)).items():
        number = name.partition(".")[0]
        # The tied embedding is the first parameter of both the first and the last stage.
        in_stage = int(number) in numbers if number.isdecimal() else stage in (0, stages - 1)
        if in_stage:
            slices[name] = tensor
    return slices
