"""Retro of megatron.core 0.15.3, the last version with it, on the CPU; a program.

    PYTHONPATH=.venv/megatron-core-0.15.3:. python retro_core.py save FOLDER
    PYTHONPATH=.venv/megatron-core-0.15.3:. python retro_core.py distribute FOLDER
    PYTHONPATH=.venv/megatron-core-0.15.3:. python retro_core.py load FOLDER

`save` writes, for each case, FOLDER/CASE/torch as Megatron-LM does with --ckpt-format torch, and
inputs, logits and gradients in FOLDER/CASE/oracle.pt. `distribute` writes FOLDER/CASE/torch_dist,
the same model as with --ckpt-format torch_dist: its processes take seconds to start. `load` loads
the checkpoints FOLDER/CASE/ours-torch and FOLDER/CASE/ours-torch_dist, and writes logits beside
them.
"""

import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.support.dist_cores import without_gpu

CHUNK_LENGTH, NUM_NEIGHBORS, NUM_CHUNKS, ROWS = 4, 2, 4, 2
"""Sizes of the inputs; a neighbor has two chunks."""
_GPT = {
    "swiglu": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "bias_gelu_fusion": True,
}
_LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "bias_gelu_fusion": False,
}
CASES: dict[str, dict[str, Any]] = {"gpt": _GPT, "llama": _LLAMA}
"""Arguments of Megatron-LM that differ from `arguments`."""


def arguments(name: str) -> Namespace:
    """Arguments of a case."""
    usual = {
        "num_layers": 9,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "max_position_embeddings": CHUNK_LENGTH * NUM_CHUNKS,
        "norm_epsilon": 1e-3,
        "vocab_size": 96,
        "padded_vocab_size": 96,
        "rotary_base": 10000,
        "retro_add_retriever": True,
        "retro_chunk_length": CHUNK_LENGTH,
        "retro_encoder_layers": 2,
        "retro_encoder_hidden_dropout": 0.1,
        "retro_encoder_attention_dropout": 0.2,
        "retro_num_neighbors": NUM_NEIGHBORS,
        "retro_num_retrieved_chunks": 2,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    return Namespace(**{**usual, **CASES[name]})


def model_of(args: Namespace) -> Any:
    """A Retro with random weights, norms and biases included."""
    import torch
    from megatron.core.models.retro import RetroConfig, RetroModel, get_retro_decoder_block_spec
    from torch.nn import functional as F

    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
        *("normalization", "add_bias_linear", "retro_chunk_length", "retro_num_neighbors"),
        "retro_num_retrieved_chunks",
    )
    config = RetroConfig(
        **{name: getattr(args, name) for name in same},
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        retro_encoder_num_layers=args.retro_encoder_layers,
        retro_encoder_hidden_dropout=0.0,
        retro_encoder_attention_dropout=0.0,
        retro_split_preprocessing="98,2,0",
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
    )
    torch.manual_seed(1)
    model = RetroModel(
        config,
        get_retro_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        parallel_output=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model


def start(meeting: Path) -> None:
    """megatron.core without a GPU, without Transformer Engine, and without compiled functions."""
    import torch
    import torch.distributed as dist

    torch.compile = lambda function: function  # type: ignore # to compile takes many seconds
    from megatron.core import parallel_state
    from megatron.core.models.retro import config
    from megatron.core.tensor_parallel import random

    class Tracker:
        def fork(self, *_: Any) -> Any:
            return nullcontext()

    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    without_gpu()
    random._CUDA_RNG_STATE_TRACKER = Tracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    torch.cuda.current_device = lambda: "cpu"  # type: ignore
    config.is_te_min_version = lambda _: False  # it compares a version that is None


def inputs_of(args: Namespace) -> dict[str, Any]:
    """Random tokens and neighbors."""
    import torch

    generator = torch.Generator().manual_seed(2)
    shapes = {
        "tokens": (ROWS, CHUNK_LENGTH * NUM_CHUNKS),
        "neighbors": (ROWS, NUM_CHUNKS, NUM_NEIGHBORS, 2 * CHUNK_LENGTH),
    }
    return {
        name: torch.randint(args.vocab_size, shape, generator=generator)
        for name, shape in shapes.items()
    }


def logits_of(model: Any, args: Namespace) -> Any:
    """Logits (B, L, V), as pretrain_retro.py calls the model."""
    import torch

    tokens, neighbors = inputs_of(args).values()
    length, rows = tokens.shape[1], neighbors.flatten(0, 2)
    return model(
        tokens,
        torch.arange(length).expand(ROWS, length),
        torch.ones(length, length, dtype=torch.bool).triu(1)[None, None],
        context_input_ids=rows,
        context_position_ids=torch.arange(rows.shape[1]).expand(rows.shape),
        context_mask=None,
    )


def save(folder: Path, name: str) -> None:
    """Checkpoint, inputs, logits and gradients of a case."""
    import torch

    args = arguments(name)
    model = model_of(args)
    logits = logits_of(model, args)
    logits.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    file = _begun(folder / "torch") / "mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir()
    torch.save({**_common(args), "model": model.state_dict_for_save_checkpoint()}, file)
    oracle = {**inputs_of(args), "logits": logits.detach(), "gradients": gradients}
    torch.save(oracle, folder / "oracle.pt")


def distribute(folder: Path, name: str) -> None:
    """Distributed checkpoint of a case."""
    from megatron.core import dist_checkpointing

    args = arguments(name)
    state = {**_common(args), "model": model_of(args).sharded_state_dict()}
    dist_checkpointing.save(state, str(_begun(folder / "torch_dist")))


def _common(args: Namespace) -> dict[str, Any]:
    """Entries of each checkpoint, beside the model."""
    return {"args": args, "checkpoint_version": 3.0, "iteration": 7}


def _begun(checkpoints: Path) -> Path:
    """A new folder of the newest checkpoint."""
    folder = checkpoints / "iter_0000007"
    folder.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def load(folder: Path, name: str) -> None:
    """Logits of checkpoints that tokamake wrote."""
    import torch
    from megatron.core import dist_checkpointing

    args = arguments(name)
    for form in ("torch", "torch_dist"):
        model = model_of(args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        (path,) = (folder / f"ours-{form}").glob("iter_*")
        if form == "torch":
            state = torch.load(path / "mp_rank_00/model_optim_rng.pt", weights_only=False)
            weights = {_local(name): each for name, each in state["model"].items()}
        else:
            sharded = {"model": model.sharded_state_dict()}
            weights = dist_checkpointing.load(sharded, str(path))["model"]
        missing, unknown = model.load_state_dict(weights, strict=False)
        assert not unknown, unknown
        assert all(name.endswith("_extra_state") for name in missing), missing
        torch.save(logits_of(model, args).detach(), folder / f"ours-{form}/logits.pt")


def _local(name: str) -> str:
    """Name of a tensor in layers without Transformer Engine, which fuses norms."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def main(do: str, folder: Path) -> None:
    """All cases."""
    start(folder.with_name(f"{folder.name}.{do}"))
    work = {"save": save, "distribute": distribute, "load": load}[do]
    for name in CASES:
        work(folder / name, name)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
