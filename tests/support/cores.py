"""Checkpoints of megatron.core's own GPT, BERT and T5 on the CPU, with logits; a program.

    python cores.py FOLDER RANK SIZE

FOLDER gets a checkpoint a case, as Megatron-LM writes it with --ckpt-format torch, and its logits.
"""

import io
import sys
import zlib
from argparse import Namespace
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.core_arguments import (
    ALL,
    BERTS,
    CASES,
    LATENT,
    OF_ALL,
    ROWS,
    T5S,
    YARN,
    arguments,
)

TOKENS = (2, 24)
"""Rows and length of what logits are of: numbers from 0 on."""
NUM_PADDING = 5
"""Tokens at the end of the last row that are padding."""


def model_of(args: Namespace, rank: int, **options: Any) -> Any:
    """A rank's part of a megatron.core model, with random weights; options of its class."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.moe import grouped_gemm_util
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )
    from torch.nn import functional as F

    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
        *("num_query_groups", "qk_layernorm", "normalization", "add_bias_linear", "params_dtype"),
        *(
            "add_qkv_bias",
            *("moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"),
            *("moe_layer_freq", "moe_shared_expert_intermediate_size", "mtp_num_layers"),
            *("moe_router_num_groups", "moe_router_group_topk", "moe_router_score_function"),
            *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
            *("glu_linear_offset", "activation_func_clamp_value", "softmax_type"),
            "window_attn_skip_freq",
            *("expert_model_parallel_size", "moe_grouped_gemm"),
            "no_rope_freq",
            "window_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
        ),
    )
    latent = (*LATENT, *YARN, "rotary_base") if args.multi_latent_attention else ()
    own = {name: getattr(args, name) for name in latent if hasattr(args, name)}
    own.pop("norm_epsilon", None)
    activation = F.silu if args.swiglu else F.gelu
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **{name: getattr(args, name) for name in same} | own,
        num_moe_experts=args.num_experts,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu or args.quick_geglu,
        activation_func=quick_gelu if args.quick_geglu else activation,
        bias_activation_fusion=args.bias_gelu_fusion,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        pipeline_dtype=args.params_dtype,
    )
    torch.manual_seed(1)
    build = _bert if hasattr(args, "bert_binary_head") else _gpt
    build = _t5 if hasattr(args, "decoder_num_layers") else build
    model = build(args, config, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = rank if getattr(parameter, "tensor_model_parallel", False) else 0
            if getattr(parameter, "shared_embedding", False):
                # The copy of a tied embedding in the last pipeline stage has another name.
                name = "embedding.word_embeddings.weight"
            elif not options.get("pre_process", True):
                name = f"later {name}"
            if not getattr(parameter, "allreduce", True):
                name = f"{parallel_state.get_expert_model_parallel_rank()} {name}"
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {part}".encode()))
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(".expert_bias"):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.1)
    return model.eval()


def _bert(args: Namespace, config: Any, **options: Any) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config,
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=ROWS,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=True,
        add_binary_head=args.bert_binary_head,
        parallel_output=False,
        **options,
    )


def _t5(args: Namespace, config: Any, **options: Any) -> Any:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    of_decoder = copy(config)
    of_decoder.num_layers = args.decoder_num_layers
    specs = (
        t5_spec.get_t5_encoder_with_local_block_spec(args.num_layers),
        t5_spec.get_t5_decoder_with_local_block_spec(args.decoder_num_layers),
    )
    for spec in specs:
        spec.layer_norm = WrappedTorchNorm  # without Transformer Engine, stacks would have none
    return T5Model(
        of_decoder,
        config,
        *specs,
        vocab_size=ROWS,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=True,
        parallel_output=False,
        **options,
    )


def _latent_core() -> Any:
    """megatron.core's attention without Transformer Engine, for values as wide as `kv_channels`.

    It finds widths in its inputs, but does not take the arguments that latent attention passes.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentCore(DotProductAttention):
        def __init__(self, **options: Any) -> None:
            options.pop("k_channels", None)
            width = options["config"].kv_channels
            assert options.pop("v_channels", width) == width
            super().__init__(**options)

    return LatentCore


def _gpt(args: Namespace, config: Any, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    spec: Any = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        moe_grouped_gemm=args.moe_grouped_gemm,
        normalization=args.normalization,
        qk_layernorm=args.qk_layernorm,
    )
    if isinstance(args.moe_layer_freq, list):
        spec = get_gpt_decoder_block_spec(config, False, normalization=args.normalization)
        for layer in spec.layer_specs if args.multi_latent_attention else ():
            layer.submodules.self_attention.submodules.core_attention = _latent_core()
    return GPTModel(
        config,
        spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False) if args.mtp_num_layers else None,
        vocab_size=ROWS,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        parallel_output=False,
        **options,
    )


def start(
    meeting: Path,
    rank: int,
    size: int,
    tensor_size: int,
    pipeline_size: int = 1,
    expert_size: int = 1,
) -> None:
    """megatron.core without a GPU, which it asks for in two places, and Transformer Engine."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    class Tracker:
        def fork(self, *_: Any) -> Any:
            return nullcontext()

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(meeting), size), rank=rank, world_size=size
    )
    parallel_state.initialize_model_parallel(
        tensor_size, pipeline_size, expert_model_parallel_size=expert_size
    )
    # megatron.core looks for them even if they could not be imported.
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    random._CUDA_RNG_STATE_TRACKER = Tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    torch.cuda.current_device = lambda: "cpu"  # type: ignore


def _stepped(model: Any) -> dict[str, Any]:
    """State of an Adam whose gradients were the weights; its first moments are half of these."""
    import torch

    parameters = [parameter for _, parameter in model.named_parameters()]
    groups = [
        [each for each in parameters if (each.dim() > 1) == decays] for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups], lr=0.0, betas=(0.5, 0.75)
    )
    for each in parameters:
        each.grad = each.detach().clone()
    optimizer.step()
    return optimizer.state_dict()


def inputs_of_bert() -> Any:
    """Mask of tokens that are no padding, and types of tokens."""
    import torch

    padding_mask = torch.ones(TOKENS, dtype=torch.bool)
    padding_mask[-1, -NUM_PADDING:] = False
    return padding_mask, (torch.arange(TOKENS[1]) >= 9).long().expand(TOKENS)


def decoder_tokens() -> Any:
    """Tokens of the decoder of a T5: half as many as those of the encoder."""
    import torch

    rows, length = TOKENS
    return torch.arange(rows * length // 2).view(rows, -1) + 50


def _logits_of_t5(model: Any, tokens: Any) -> Any:
    padding_mask, _ = inputs_of_bert()
    of_decoder = decoder_tokens()
    later = of_decoder.new_ones(of_decoder.shape[1], of_decoder.shape[1]).bool().triu(1)
    hidden = ~padding_mask[:, None, None]  # True: not seen
    length, of_decoder_length = tokens.shape[1], of_decoder.shape[1]
    return model(
        tokens,
        of_decoder,
        hidden.expand(-1, 1, length, -1),
        later[None, None],
        hidden.expand(-1, 1, of_decoder_length, -1),
    )


def _on_cpu() -> Any:
    """Make masks of ones on the CPU: megatron.core makes those of windows on a GPU."""
    import torch

    ones = torch.ones
    return patch.object(torch, "ones", lambda *sizes, **o: ones(*sizes, **{**o, "device": "cpu"}))


def write(folder: Path, name: str, rank: int, size: int) -> None:
    """A rank's part of the checkpoint of a case."""
    import torch

    args = arguments(name)
    args.tensor_model_parallel_size = size
    model = model_of(args, rank)
    rows, length = TOKENS
    tokens = torch.arange(rows * length).view(TOKENS)
    with torch.no_grad():
        if name in BERTS:
            padding_mask, types = inputs_of_bert()
            types = types if args.bert_binary_head else None
            logits = model(tokens, padding_mask.long(), types)
        elif name in T5S:
            logits = _logits_of_t5(model, tokens)
        else:
            positions = torch.arange(length).expand(rows, length)
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
            # Without labels, Megatron returns no logits of MTP layers; so it has them as more rows.
            model.config.mtp_num_layers = None
            with _on_cpu():
                logits = model(tokens, positions, hidden)
    file = folder / f"iter_0000007/mp_rank_{rank:02d}/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    weights = model.state_dict_for_save_checkpoint()
    stack = "decoder" if name in CASES else "encoder"
    weights[f"{stack}.layers.0.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"scales")
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": weights}
    torch.save({**state, "optimizer": _stepped(model)}, file)
    if rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
        torch.save(logits, folder / "logits.pt")


def main(folder: Path, rank: int, size: int) -> None:
    """All cases."""
    start(folder.with_name(f"{folder.name}.meeting"), rank, size, size)
    for name in OF_ALL:
        heads = ALL[name].get("num_query_groups") or size
        of_one = {"kv_lora_rank", "quick_geglu"} & {*ALL[name]}
        if heads % size == 0 and not (size > 1 and of_one):
            write(folder / name, name, rank, size)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
