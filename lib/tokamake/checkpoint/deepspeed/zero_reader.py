"""DeepSpeed's optimizer states of ZeRO stages 1 to 3: what lies where in the ranks' files.

global_step<N>/[bf16_]zero_pp_rank_<D>_mp_rank_<M>_optim_states.pt has what data-parallel rank D of
model-parallel rank M holds: of each parameter group flat tensors, in which parameters follow one
another and are cut anywhere (stages 1 and 2), or a slice of each parameter (stage 3).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.folder import REMEDY
from tokamake.checkpoint.deepspeed.zero_partition import FlatRange, partition, share, slice_of
from tokamake.checkpoint.megatron_model.module import newer
from tokamake.checkpoint.megatron_model.rank_tensors import TensorSlice
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, TensorSource
from tokamake.checkpoint.tensors.flat_runs import cut
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.checkpoint.torch_files.allowed_globals import StandIn, value_of
from tokamake.checkpoint.torch_files.pickle_reader import Located
from tokamake.errors import UserError

_FLAT = "single_partition_of_fp32_groups"
_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
"""DeepSpeed's ZeroStageEnum."""
MODEL, MASTER = "model.", "master."
"""Keys of fp32 weights begin so: where there are no others, and where they stand beside rounded
ones."""


@dataclass
class States:
    """What all shards hold of whole tensors."""

    regions: list[Extent] = field(default_factory=list)
    given: dict[str, float] = field(default_factory=dict)
    """Numbers that the files do not have as tensors, by key."""
    numbers: set[str] = field(default_factory=set)
    """Keys of those that files have as tensors without dimensions."""
    zero_stage: int = 0
    data_parallel_size: int = 0
    """0: there are no shards."""
    notes: dict[str, Any] = field(default_factory=dict)
    """See `Checkpoint`."""

    def source(
        self, weights: Iterable[Extent], shapes: Mapping[str, tuple[int, ...]]
    ) -> TensorSource:
        """Weights and states as whole tensors.

        Args:
            weights: where weights lie; of stage 3, nowhere else.
            shapes: of whole weights, as model.NAME.

        Raises:
            UserError: something is not there whole.
        """
        every = dict(shapes)
        for region in self.regions:
            for key in (block.key for block in region.blocks):
                every[key] = shapes[f"model.{parameter(key)}"] if region.shape else ()
        return TensorSource([*weights, *self.regions], every, self.given)


def parameter(key: str) -> str:
    """Name of the parameter that a tensor is of; see `Checkpoint.source`."""
    return key.split(".", 2 if key.startswith("optimizer.") else 1)[-1]


_Shard = tuple[Path, dict[str, Any]]
"""A file, and the optimizer_state_dict in it."""


class _Group(NamedTuple):
    """What a file has of a parameter group."""

    file: Path
    pieces: Sequence[FlatRange]
    weights: Located
    """Flat, of which the pieces tell what is where."""
    states: Mapping[str, Any]
    """By kind: tensors like `weights`, or numbers that all parameters share."""


def _has_states(folder: Path) -> bool:
    """Whether a folder has files of shards."""
    return any(_FILE.fullmatch(file.name) for file in folder.iterdir())


def read(
    folder: Path,
    ranks: Sequence[Mapping[str, TensorSlice]],
    *,
    tensor_parallel_size: int,
    beside: Sequence[Extent],
) -> States:
    """Say where optimizer states lie.

    Args:
        folder: of the checkpoint.
        ranks: what each model-parallel rank may have, by DeepSpeed's names.
        tensor_parallel_size: how many of them share layers; such are neighbours.
        beside: weights in other files; fp32 weights are read where they are not fp32.

    Raises:
        UserError: a file is missing or damaged, or not of the model.
    """
    found, owners = States(), dict[tuple[int, str], int]()
    if not _has_states(folder):
        return found
    weights: str | None = MASTER if beside else MODEL
    if beside and all(region.dtype == FLOAT32 for region in beside):
        weights = None
    for model, parts in enumerate(ranks):
        shards = _shards(folder, model)
        first = shards[0][1]
        found.data_parallel_size, found.zero_stage = len(shards), _stage(first)
        found.notes["loss_scale"] = _loss_scale(first)
        base = first.get("base_optimizer_state", first.get("optimizer_state_dict"))
        found.notes |= settings_of(base.get("param_groups") if isinstance(base, dict) else None)
        for group in _groups(folder, model, shards):
            # Tied parameters, which several pipeline stages have, count once.
            own: dict[str, TensorSlice] = {}
            for name in {piece.name for piece in group.pieces}:
                owner = owners.setdefault((model % tensor_parallel_size, name), model)
                if owner == model and not (part := _part(parts, name, group.file)).is_copy:
                    own[name] = part
            _add(found, group, own, weights)
    return found


def _shards(folder: Path, model: int) -> list[_Shard]:
    """Files of a model-parallel rank's data-parallel ranks, and what is in them.

    Raises:
        UserError: one is missing or damaged.
    """
    matches = {file: _FILE.fullmatch(file.name) for file in folder.iterdir()}
    files = {int(m[1]): file for file, m in matches.items() if m and int(m[2]) == model}
    shards = []
    for _, file in sorted(files.items()):
        state = deepspeed_folder.read(file).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise UserError(f"{file}: holds no optimizer_state_dict; {REMEDY}")
        shards.append((file, state))
    counts = shards[0][1].get("partition_count") if shards else 1
    count = max(counts) if isinstance(counts, list) else int(counts or len(files))
    if missing := sorted({*range(max(count, *files, 1))} - files.keys()):
        raise UserError(
            f"{folder}: has no optimizer states of data-parallel rank {missing[0]} of {count} "
            f"(model-parallel rank {model}); {REMEDY}"
        )
    return shards


def _groups(folder: Path, model: int, shards: Sequence[_Shard]) -> list[_Group]:
    """What each file has of each parameter group.

    Raises:
        UserError: the files are put together in a way that no DeepSpeed does that is known.
    """
    shapes = deepspeed_folder.read(deepspeed_folder.states(folder, model)).get("param_shapes")
    try:
        if shapes is None:
            return [*_mapped(shards)]
        if _stage(shards[0][1]) == 3:
            return [*_sliced(shapes, shards)]
        return [*_partitioned(shapes, shards)]
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{shards[0][0]}: optimizer states in an order that is not known ({reason}); have "
            "DeepSpeed's ds_to_universal convert them, and name what it writes"
        ) from None


def _stage(state: Mapping[str, Any]) -> int:
    if "fp32_flat_groups" in state:
        return 3
    found = state.get("zero_stage", 1)
    if (stage := value_of(found, _STAGES)) is None:
        raise UserError(f"zero_stage: {found!r}: not a stage of DeepSpeed's that is known")
    return int(stage)


def _loss_scale(state: Mapping[str, Any]) -> tuple[float, int]:
    """The scale, and steps without an overflow since it has changed, which we do not know."""
    scaler = state.get("loss_scaler")
    known = scaler.values if isinstance(scaler, StandIn) else {}
    return float(known.get("cur_scale", 1.0)), 0


def settings_of(groups: Any) -> dict[str, Any]:
    """Note of the settings that torch's optimizer has in its groups, of which the first decays."""
    first = groups[0] if isinstance(groups, list) and groups else {}
    kept: dict[str, Any] = {}
    for name in ("lr", "betas", "eps", "weight_decay"):
        match first.get(name):
            case int() | float() as number:
                kept[name] = float(number)
            case (float() as one, float() as other):
                kept[name] = [one, other]
    return {OPTIMIZER_SETTINGS: kept} if kept else {}


def _part(parts: Mapping[str, TensorSlice], name: str, file: Path) -> TensorSlice:
    found = parts.get(newer(name.removeprefix("module.")))
    if found is None:
        raise UserError(f"{file}: has states of {name}, which is not part of the model; {REMEDY}")
    return found


def _partitioned(
    groups: Sequence[Mapping[str, Sequence[int]]], shards: Sequence[_Shard]
) -> Iterator[_Group]:
    """Stages 1 and 2: ranks have equal parts of a group's parameters, laid one after the other."""
    for number, group in enumerate(groups):
        parts = [
            _Group(file, (), state[_FLAT][number], _of_group(state["base_optimizer_state"], number))
            for file, state in shards
        ]
        # Fp32 weights may be there without padding, moments are not.
        each = max(tensor.numel for part in parts for tensor in (part.weights, *_tensors(part)))
        paddings = shards[0][1].get("param_alignment_paddings")
        sizes = [*_sizes(group, paddings[number] if paddings else [0] * len(group))]
        for rank, part in enumerate(parts):
            pieces = partition(sizes, rank * each, (rank + 1) * each)
            yield part._replace(pieces=[piece for piece in pieces if piece.name])


def _tensors(group: _Group) -> list[Located]:
    return [each for each in group.states.values() if isinstance(each, Located)]


def _sizes(
    group: Mapping[str, Sequence[int]], paddings: Iterable[int]
) -> Iterator[tuple[str, int]]:
    """Elements of parameters, and of the gaps behind them, which have no name."""
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        yield name, math.prod(shape)
        yield "", padding


def _mapped(shards: Iterable[_Shard]) -> Iterator[_Group]:
    """Stage 0 in bf16: as in stage 1, but shards alone tell what they have.

    Those of other stages tell it wrongly where `round_robin_gradients` has changed the order.
    """
    done: dict[str, int] = defaultdict(int)
    for file, state in shards:
        groups = zip(state["param_slice_mappings"], state[_FLAT], strict=True)
        for number, (fragments, weights) in enumerate(groups):
            pieces = []
            for name, fragment in fragments.items():
                start, stop = done[name], done[name] + fragment.values["numel"]
                pieces.append(FlatRange(name, start, stop, fragment.values["start"]))
                done[name] = stop
            states = _of_group(state["base_optimizer_state"], number)
            yield _Group(file, pieces, weights, states)


def _sliced(
    groups: Iterable[Mapping[str, Sequence[int]]], shards: Sequence[_Shard]
) -> Iterator[_Group]:
    """Stage 3: each rank has a slice of each parameter; the last ones' are filled up."""
    sizes = [(name, math.prod(shape)) for group in groups for name, shape in group.items()]
    for rank, (file, state) in enumerate(shards):
        rest = iter(sizes)
        for number, weights in enumerate(state["fp32_flat_groups"]):
            pieces, at = list[FlatRange](), 0
            while at < weights.numel:
                name, size = next(rest)
                pieces.append(slice_of(name, size, rank, len(shards), at))
                at += share(size, len(shards))
            states = _of_group(state["optimizer_state_dict"], number)
            yield _Group(file, pieces, weights, states)


def _of_group(base: Any, number: int) -> dict[str, Any]:
    """States of torch's optimizer for a group, of which DeepSpeed has made one parameter."""
    if isinstance(base, list):
        return dict(base[number])
    group = next(group for group in base["param_groups"] if number in group["params"])
    in_group = {key: value for key, value in group.items() if key == "step"}
    return in_group | base["state"].get(number, {})


def _add(found: States, group: _Group, own: Mapping[str, TensorSlice], weights: str | None) -> None:
    """Add a group's tensors.

    Args:
        found: what is added to.
        group: of a file.
        own: the parameters that count.
        weights: see `read`.
    """
    pieces = [piece for piece in group.pieces if piece.name in own]
    if weights is not None:
        found.regions.append(_region(group, "fp32 weights", group.weights, weights, pieces, own))
    for kind, value in group.states.items():
        prefix = f"optimizer.{kind}."
        if isinstance(value, Located) and value.shape:
            found.regions.append(_region(group, kind, value, prefix, pieces, own))
            continue
        keys = {
            prefix + block.key.removeprefix(MODEL)
            for piece in pieces
            if piece.start == 0
            for block in own[piece.name].blocks
        }
        if isinstance(value, Located):
            if keys := keys - found.numbers:
                blocks = (*(Chunk(key, ()) for key in sorted(keys)),)
                found.regions.append(torch_archive.region(group.file, kind, value, blocks))
                found.numbers |= keys
        elif isinstance(value, int | float):
            found.given |= dict.fromkeys(keys, float(value))


def _region(
    group: _Group,
    name: str,
    tensor: Located,
    prefix: str,
    pieces: Iterable[FlatRange],
    own: Mapping[str, TensorSlice],
) -> Extent:
    blocks = (*_blocks_of(pieces, own, prefix),)
    return torch_archive.region(group.file, name, tensor, blocks)


def _blocks_of(
    pieces: Iterable[FlatRange], parts: Mapping[str, TensorSlice], prefix: str
) -> Iterator[Chunk]:
    """What a flat tensor is made of, padding left out.

    Args:
        pieces: what it has of which parameters.
        parts: what parameters are made of, as model.NAME.
        prefix: what the keys begin with in its place.
    """
    for piece in pieces:
        for block in cut(parts[piece.name].blocks, piece.start, piece.stop):
            if not block.is_mean:
                key = prefix + block.key.removeprefix(MODEL)
                yield block._replace(key=key, start=piece.at + block.start)
