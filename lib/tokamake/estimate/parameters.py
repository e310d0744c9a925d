"""Parameters of a model and its pipeline stages, from the shapes of tensors, without torch."""

import math
import re
from functools import lru_cache, partial

from tokamake.checkpoint import model_tensors
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import Run
from tokamake.train.memory import StageSize

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_DIVIDED = re.compile(
    r"_proj\.weight|([qkv]|gate|up)_proj\.bias|embed_tokens\.weight|lm_head\.(weight|bias)$"
)
"""Tensors that tensor-parallel ranks divide; each rank has all other tensors whole."""
_OF_EXPERTS = re.compile(r"\.experts\.")
"""Stacks of experts, which expert-parallel ranks divide."""
_AT_THE_START = re.compile(r"\.embed_")
"""Tensors of the first pipeline stage."""


class _Sizes:
    """Elements on a tensor- and expert-parallel rank, by their part of the model."""

    def __init__(self, architecture: Architecture, *, ranks: int, expert_ranks: int) -> None:
        self.layers: dict[int, int] = {}
        """Layer → elements; equal numbers of several stacks are added."""
        self.experts: dict[int, int] = {}
        """Layer → elements of its experts, which `layers` counts, too."""
        self.has_gate = False
        self.first = self.last = self.embedding = 0
        for name, shape in model_tensors.shapes(architecture).items():
            size = _elements(name, shape, architecture=architecture, ranks=ranks)
            if match := _LAYER.search(name):
                number = int(match[1])
                if _OF_EXPERTS.search(name):
                    size //= expert_ranks
                    self.experts[number] = self.experts.get(number, 0) + size
                self.layers[number] = self.layers.get(number, 0) + size
                self.has_gate |= ".gate_proj." in name
            elif _AT_THE_START.search(name):
                self.first += size
                self.embedding += size if "embed_tokens" in name else 0
            else:
                self.last += size


@lru_cache(maxsize=64)
def _sizes(text: str, *, ranks: int, expert_ranks: int) -> _Sizes:
    architecture = Architecture.model_validate_json(text)
    return _Sizes(architecture, ranks=ranks, expert_ranks=expert_ranks)


def _elements(name: str, shape: tuple[int, ...], *, architecture: Architecture, ranks: int) -> int:
    size = math.prod(shape)
    if not _DIVIDED.search(name):
        return size
    if re.search(r"\.[kv]_proj\.", name) and ranks > architecture.num_key_value_heads:
        return size  # see `parallel/tensor.py`
    return -(-size // ranks)


def num_parameters(architecture: Architecture) -> int:
    """Parameters of the whole model."""
    return sum(map(math.prod, model_tensors.shapes(architecture).values()))


def num_tensors(architecture: Architecture) -> int:
    """Tensors of the whole model."""
    return len(model_tensors.shapes(architecture))


def has_gated_mlp(architecture: Architecture) -> bool:
    """Whether the MLP multiplies its up projection by a gate."""
    return _sizes(architecture.model_dump_json(), ranks=1, expert_ranks=1).has_gate


def stage_sizes(run: Run, rank: int) -> list[StageSize]:
    """Stages of a pipeline rank, for `train.memory.estimate`."""
    parallel, architecture = run.train.parallel, run.architecture
    expert_ranks = parallel.expert_parallel_size
    sizes = _sizes(
        architecture.model_dump_json(),
        ranks=parallel.tensor_parallel_size,
        expert_ranks=expert_ranks,
    )
    stages = parallel.layers_of_stages(architecture.num_hidden_layers)
    found = []
    for number in parallel.stages_of_rank(rank):
        is_first, is_last = number == 0, number == len(stages) - 1
        numbers = [*stages[number], *(architecture.mtp_layers if is_last else ())]
        layers = [sizes.layers.get(layer, 0) for layer in numbers]
        if len(stages) == 1:
            layers = [*sizes.layers.values()]
        total = sum(layers) + sizes.first * is_first + sizes.last * is_last
        has_copy = architecture.tie_word_embeddings or architecture.num_mtp_layers
        if is_last and not is_first and has_copy:
            total += sizes.embedding
        experts = sum(sizes.experts.get(layer, 0) for layer in numbers)
        share = partial(_share, dense=total - experts, experts=experts, expert_ranks=expert_ranks)
        found.append(StageSize(layers, total, is_last, share, experts))
    return found


def _share(shards: int, *, dense: int, experts: int, expert_ranks: int) -> float:
    return dense / max(1, shards) + experts / max(1, shards // expert_ranks)
