"""DeepSpeed's experts: Megatron-DeepSpeed's arguments of them, and their files.

[layer_<L>_]expert_<E>_mp_rank_<M>_model_states.pt holds an expert by its name in the model, with
its number among all ranks. It is whole unless tensor-parallel ranks divide experts.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.megatron_model import module_tree, rank_file
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
    target_ranks,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

EXPERT = "deepspeed_experts."
"""Part of the names of experts' parameters, before the number."""
_FILE = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(\d+)_model_states\.pt")
_REFUSED = {
    "expert_interval": (1, 2, "layers without experts among layers with experts"),
    "swiglu": (True, False, "experts without a gate"),
    "normalization": ("rmsnorm", "layernorm", "experts beside other norms than RMSNorms"),
    "mlp_type": ("standard", "standard", "an MLP that all tokens pass beside an expert"),
    "add_bias_linear": (False, True, "biases, but after experts DeepSpeed adds none"),
}
"""Arguments whose values other than the first one mean a model that tokamake does not have, their
default, and that meaning."""
_log = logging.getLogger(__name__)
_THEIR_NAMES = (
    ("pre_mlp_layernorm.", "post_attention_layernorm."),
    ("mlp.router.", "mlp.deepspeed_moe.gate.wg."),
    ("mlp.experts.local_experts.", f"mlp.deepspeed_moe.experts.{EXPERT}"),
    (".linear_fc1.", ".dense_h_to_4h."),
    (".linear_fc2.", ".dense_4h_to_h."),
)
"""Parts of names in megatron.core, and Megatron-DeepSpeed's."""
_OF_EXPERT = re.compile(rf"layers\.(\d+)\..*{re.escape(EXPERT)}(\d+)\.")
_NUMBER = re.compile(rf"(?<={re.escape(EXPERT)})\d+")


class ExpertRanks(NamedTuple):
    """Division of experts among data-parallel ranks."""

    num_experts: int
    is_strided: bool
    """Whether consecutive ranks have the same experts: use_data_before_expert_parallelism."""

    def place(
        self, shapes: Mapping[str, Sequence[int]], rank: int, *, num_ranks: int
    ) -> tuple[int, dict[str, Sequence[int]]]:
        """Return a rank's place among those with the same parameters, and its parameters.

        `shapes`: parameters of the first rank, either experts or others.
        """
        numbers = [int(match[0]) for name in shapes if (match := _NUMBER.search(name))]
        if not numbers:
            return rank, {**shapes}
        num_own = max(numbers) + 1
        num_groups = self.num_experts // num_own or 1
        if self.is_strided:
            group, place = divmod(rank, num_ranks // num_groups)
        else:
            place, group = divmod(rank, num_groups)

        def renamed(match: re.Match[str]) -> str:
            return f"{group * num_own + int(match[0])}"

        return place, {_NUMBER.sub(renamed, name): shape for name, shape in shapes.items()}


NO_EXPERTS = ExpertRanks(1, is_strided=False)


def translate(args: Any, file: Path) -> None:
    """Give arguments of DeepSpeed's experts Megatron-LM's names, or refuse them."""
    numbers = {*_listed(args.num_experts)}
    if len(numbers) > 1:
        raise _refused(
            *(file, "num_experts"),
            value=args.num_experts,
            meaning="layers with different experts",
        )
    for name, (known, default, meaning) in _REFUSED.items():
        value = getattr(args, name, default)
        if (value.lower() if isinstance(value, str) else value) != known:
            raise _refused(file, name, value=value, meaning=meaning)
    if (chosen := getattr(args, "topk", 1)) == 1:
        meaning = "weights of experts that are raw probabilities"
        raise _refused(file, "topk", value=chosen, meaning=meaning)
    (args.num_experts,) = numbers
    args.moe_router_topk = chosen
    usual = {"moe_token_dropping": "drops tokens beyond a capacity"}
    if chosen == 2:
        usual["moe_top2_2nd_expert_sampling"] = "draws each token's second expert at random"
    if at_random := [does for name, does in usual.items() if getattr(args, name, True)]:
        _log.warning(
            "%s: Megatron-DeepSpeed %s, also in evaluation; tokamake does not",
            *(file, " and ".join(at_random)),
        )


def expert_ranks(args: Any, state: Mapping[str, Any]) -> ExpertRanks:
    """Return how the ranks that saved a checkpoint divided experts."""
    config = state.get("ds_config")
    is_strided = isinstance(config, dict) and config.get("use_data_before_expert_parallelism")
    return ExpertRanks(args.num_experts, bool(is_strided))


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _refused(file: Path, name: str, *, value: Any, meaning: str) -> UserError:
    return UserError(
        f"{file}: args.{name}: {value!r}: means {meaning}, which no family of tokamake has; give a "
        "checkpoint of a model without"
    )


def slices_of(rank: TensorParallelRank, args: Any) -> dict[str, TensorSlice]:
    """Return a rank's tensors by current names; experts are whole unless ranks divide them."""
    layers = range(rank.architecture.num_hidden_layers)
    slices = module_tree.current_slices(module_tree.stage_tree(rank, layers))
    if rank.axis.size > 1 and not _are_divided(args):
        tree = module_tree.stage_tree(replace(rank, axis=Axis(0, 1)), layers)
        whole = module_tree.current_slices(tree)
        slices |= {name: tensor for name, tensor in whole.items() if tensor.of_stack}
    return slices


def _are_divided(args: Any) -> bool:
    return bool(getattr(args, "enable_expert_tensor_parallelism", False))


def locate_others(
    file: Path, state: Mapping[str, Any], *, slices: Mapping[str, TensorSlice]
) -> list[Extent]:
    """Return the extents of a rank's tensors that are not experts."""
    if deepspeed_folder.has_no_weights(file):
        raise UserError(
            f"{file}: is of ZeRO stage 3, in which experts are not read; give a checkpoint of "
            "another stage"
        )
    # Some versions of DeepSpeed leave the experts of the first rank in this file.
    module = {
        name: value
        for name, value in torch_archive.leaves(state.get("module"))
        if EXPERT not in name
    }
    others = {name: tensor for name, tensor in slices.items() if not tensor.of_stack}
    return [*module_tree.locate(file, module, others)]


def locate(folder: Path, args: Any, *, slices: Sequence[Mapping[str, TensorSlice]]) -> list[Extent]:
    """Return the extents of all experts; `slices` of each tensor-parallel rank."""
    missing = {
        (number, name)
        for number, of_rank in enumerate(slices if _are_divided(args) else slices[:1])
        for name, tensor in of_rank.items()
        if tensor.of_stack
    }
    extents: list[Extent] = []
    for file in sorted(folder.iterdir()):
        if match := _FILE.fullmatch(file.name):
            number = int(match[1]) if _are_divided(args) else 0
            content = rank_file.read(file)
            names = module_tree.current_names(content)
            known = slices[number].items() if number < len(slices) else ()
            tree = {
                name: tensor._replace(is_replica=(number, name) not in missing)
                for name, tensor in known
                if name in names
            }
            extents += module_tree.locate(file, content, tree)
            missing -= {(number, name) for name in names}
    if missing:
        raise UserError(f"{folder}: has no file with {min(missing)[1]}; {REMEDY}")
    return extents


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return warnings about how Megatron-DeepSpeed has to start with a checkpoint of experts."""
    if not checkpoint.architecture.has_routers:
        return []
    return [
        "start Megatron-DeepSpeed with --disable-moe-token-dropping and "
        "--disable-moe-top2-2nd-expert-sampling, or it drops tokens and draws experts at random; "
        "with several tensor-parallel ranks also with --enable-expert-tensor-parallelism; and with "
        "--no-load-optim: optimizer states of experts are not written"
    ]


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write the files of a model with experts without the data of their tensors.

    Each tensor-parallel rank has a file for each expert, whose part it holds. Files do not depend
    on expert-parallel ranks: DeepSpeed's load_moe_state_dict opens those of a rank's experts.
    """
    architecture, layout = checkpoint.architecture, target.layout
    number_chosen = architecture.setting("num_experts_per_tok")
    if number_chosen == 1:
        raise UserError(
            "format: num_experts_per_tok: 1: Megatron-DeepSpeed weights a single expert by its raw "
            "probability, here its weight is 1; choose the format megatron, torch_dist or native"
        )
    if layout.zero_stage:
        raise UserError(
            f"zero_stage: {layout.zero_stage}: optimizer states of DeepSpeed's experts are not "
            "written; leave it out, or choose the format torch_dist or native"
        )
    numbers = [architecture.setting("num_experts")]
    extents: list[Extent] = []
    for rank in target_ranks(architecture, target):
        tree = module_tree.stage_tree(rank, range(architecture.num_hidden_layers))
        module = module_tree.planned_tree(tree, checkpoint, target=target)
        encoder = module[module_tree.ROOT]["encoder"]
        of_experts: dict[tuple[str, ...], dict[str, Any]] = {}
        for name in [*encoder]:
            tensor, theirs = encoder.pop(name), _their_name(name)
            if match := _OF_EXPERT.match(theirs):
                whole_name = f"{module_tree.ROOT}.encoder.{theirs}"
                of_experts.setdefault(match.groups(), {})[whole_name] = tensor
            else:
                encoder[theirs] = tensor
        state = deepspeed_folder.client_state(checkpoint, layout, rank.padded_vocab_size)
        vars(state["args"]).update(
            num_experts=numbers,
            topk=number_chosen,
            expert_interval=1,
            mlp_type="standard",
            moe_expert_parallel_size=1,
            moe_token_dropping=False,
            moe_top2_2nd_expert_sampling=False,
            enable_expert_tensor_parallelism=rank.axis.size > 1,
        )
        end = f"mp_rank_{rank.axis.rank:02d}_model_states.pt"
        contents = {"module": module, "num_experts": numbers, **state}
        extents += torch_archive.lay_out(folder / end, contents)
        for (layer, expert), tensors in of_experts.items():
            file = folder / f"layer_{layer}_expert_{expert}_{end}"
            extents += torch_archive.lay_out(file, tensors)
    return extents


def _their_name(name: str) -> str:
    for part, theirs in _THEIR_NAMES:
        name = name.replace(part, theirs)
    return name
