"""The family gpt equals transformers' GPT-2, GPTBigCode, Starcoder2 and Bloom, on any ranks."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.gpts import (
    ALIBI,
    ARCHITECTURES,
    LEARNED,
    MQA,
    ROTARY,
    reference,
    tensors_of,
)
from tests.support.hf_folder import from_hf
from tests.support.model_loss import mean_loss
from tests.support.model_ranks import tokens_of
from tests.support.model_steps import assert_same_step
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.config.parallel import ParallelSettings
from tokamake.errors import UserError
from tokamake.models.gpt import model as family
from tokamake.parallel.axis import Axis
from tokamake.parallel.context import share
from tokamake.parallel.mesh import Mesh


def model_with_weights_of(architecture: Architecture, oracle: Any) -> Any:
    """Our model with copies of the weights of transformers' model."""
    return to_model(architecture, from_hf(architecture, tensors_of(oracle)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_gradients_and_a_step_equal_transformers(name: str) -> None:
    architecture = ARCHITECTURES[name]
    oracle = reference(architecture)
    model = model_with_weights_of(architecture, oracle)
    tokens = tokens_of(architecture, 33)
    with torch.no_grad():
        assert (model(tokens) - oracle(tokens).logits).abs().max() <= 1e-5
    losses = mean_loss(model, tokens), oracle(tokens, labels=tokens).loss
    assert_same_step(architecture, model, oracle=oracle, losses=losses)


@pytest.mark.parametrize("architecture", [LEARNED, MQA, ROTARY, ALIBI], ids=range(4))
def test_documents_in_a_row_do_not_see_each_other(architecture: Architecture) -> None:
    model = to_model(architecture, random_tensors(architecture, 1))
    tokens = tokens_of(architecture, 20)
    documents = (torch.arange(20) >= 8).long().expand(2, -1)
    positions = torch.cat((torch.arange(8), torch.arange(12))).expand(2, -1)
    with torch.no_grad():
        together = model(tokens, position_ids=positions, document_ids=documents)
        apart = torch.cat([model(part) for part in tokens.split([8, 12], dim=1)], dim=1)
        assert not torch.allclose(model(tokens), apart, atol=1e-3)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "starcoder2", "bloom"])
def test_bf16_is_as_near_to_fp32_as_transformers(name: str) -> None:
    architecture = ARCHITECTURES[name]
    tokens = tokens_of(architecture, 60)
    with torch.no_grad():
        expected = reference(architecture)(tokens).logits
        oracle = reference(architecture, torch.bfloat16)
        model = model_with_weights_of(architecture, oracle)
        assert model(tokens).dtype == torch.bfloat16
        error = (model(tokens) - expected).abs().mean()
        assert 0 < error <= 1.1 * (oracle(tokens).logits - expected).abs().mean()
    loss = mean_loss(model, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_families_have_defaults_of_their_own() -> None:
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    llama, gpt_like = Architecture(**shape), Architecture(family="gpt", **shape)
    for architecture, defaults in (
        (llama, ("rotary", "silu", False, False, False)),
        (gpt_like, ("learned", "gelu_new", True, True, True)),
    ):
        names = ("position_embedding", "hidden_act", "attention_bias", "mlp_bias")
        names += ("tie_word_embeddings",)
        assert tuple(getattr(architecture, name) for name in names) == defaults
        assert Architecture(**architecture.model_dump()) == architecture


def test_alibi_refuses_context_parallelism() -> None:
    ParallelSettings().check_architecture(ALIBI, 32)
    split = ParallelSettings(context_parallel_size=2)
    split.check_architecture(LEARNED, 32)
    with pytest.raises(UserError, match=r"context_parallel_size: 2: .* set 1"):
        split.check_architecture(ALIBI, 32)


SHARED = {"learned": LEARNED, "mqa": MQA, "gqa-rotary": ROTARY}


METHODS: tuple[Any, ...] = ("ring", "ulysses")


def context_parallel() -> dict[tuple[str, str], Tensor]:
    """Logits of this rank's tokens, by method and model."""
    axis = Axis(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    logits = {}
    for method, name in product(METHODS, SHARED):
        mesh = Mesh(context=axis, context_method=method)
        model = family.Model(SHARED[name], mesh)
        for key, parameter in model.named_parameters():
            parameter.data = random_tensors(SHARED[name], 1)[family.Model.tensor_name(key)]
        with torch.no_grad():
            logits[method, name] = model(share(tokens_of(SHARED[name], 32), axis=axis))
    return logits


@pytest.mark.ranks
def test_context_parallel_ranks_equal_one_process() -> None:
    for rank, logits_of in enumerate(spawn(context_parallel, 2)):
        assert len(logits_of) == len(METHODS) * len(SHARED)
        for (_, name), logits in logits_of.items():
            with torch.no_grad():
                all_logits = to_model(SHARED[name], random_tensors(SHARED[name], 1))(
                    tokens_of(SHARED[name], 32)
                )
            expected = share(all_logits, axis=Axis(rank, 2))
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
