"""The family gpt equals transformers' GPT-2, GPTBigCode, Starcoder2 and Bloom, on any ranks."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.cached import decoded
from tests.support.families import named_tensors
from tests.support.gpts import (
    ALIBI,
    ARCHITECTURES,
    LEARNED,
    MQA,
    ROTARY,
    gpt,
    reference,
    tensors_of,
)
from tests.support.hf_tensors import from_hf
from tests.support.model_loss import mean_loss
from tests.support.model_ranks import assert_tensor_parallel_equals_one_process, tokens_of
from tests.support.model_steps import assert_same_step
from tests.support.paths import ROOT
from tests.support.random_tensors import random_tensors
from tests.support.ranks import spawn
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.model_tensors import shapes, to_model
from tokamake.config.architecture import Architecture, read_architecture
from tokamake.errors import UserError
from tokamake.models.gpt import memory
from tokamake.models.gpt import model as family
from tokamake.parallel.axis import Axis
from tokamake.parallel.context import share
from tokamake.parallel.mesh import Mesh
from tokamake.validation import validate

MODELS = ROOT / "config" / "models"


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


@pytest.mark.parametrize("steps", [[20], [1] * 20, [5, 1, 1, 7, 6]], ids=len)
@pytest.mark.parametrize("architecture", [LEARNED, MQA, ROTARY, ALIBI], ids=range(4))
def test_decoding_with_a_cache_equals_the_full_forward(
    architecture: Architecture, steps: list[int]
) -> None:
    model = to_model(architecture, random_tensors(architecture, 1))
    tokens = tokens_of(architecture, 20)
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(decoded(model, tokens, steps), expected, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("name", ["full", "selective"])
def test_recomputing_changes_nothing(name: Any) -> None:
    from tokamake.models.common.recompute import Recompute

    model = to_model(ALIBI, {n: t.clone() for n, t in random_tensors(ALIBI, 1).items()})
    gradients = []
    for recompute in (Recompute(), Recompute(name)):
        model.set_recompute(recompute)
        model.zero_grad()
        mean_loss(model, tokens_of(ALIBI, 33)).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(torch.equal(gradients[1][n], gradient) for n, gradient in gradients[0].items())


def test_random_weights_have_the_published_deviations() -> None:
    wide = gpt(hidden_size=512, intermediate_size=512, initializer_range=0.03)
    for name, tensor in random_tensors(wide, 1).items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight"))))
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = 0.03 / math.sqrt(2 * 3) if into_residual else 0.03
        assert abs(tensor.std().item() / deviation - 1) < 0.02


@pytest.mark.parametrize("architecture", [LEARNED, MQA, ROTARY, ALIBI], ids=range(4))
def test_names_round_trip_and_flops_equal_those_that_torch_counts(
    architecture: Architecture,
) -> None:
    weights = random_tensors(architecture, 0)
    model = to_model(architecture, weights)
    back = named_tensors(model)
    assert all(back[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.items())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        mean_loss(model, tokens_of(architecture, 33)).backward()
    assert memory.flops_per_token(architecture, 32) * 2 * 32 == counter.get_total_flops()


@pytest.mark.parametrize("architecture", [LEARNED, MQA, ROTARY, ALIBI], ids=range(4))
@pytest.mark.parametrize("cuts", [[0, 1, 3], [0, 1, 2, 3]], ids=str)
def test_pipeline_stages_equal_the_whole_model(architecture: Architecture, cuts: list[int]) -> None:
    weights = random_tensors(architecture, 1)
    whole = to_model(architecture, weights)
    x = tokens = tokens_of(architecture, 20)
    with torch.no_grad():
        for first, last in pairwise(cuts):
            stage = family.Model(architecture, stage=range(first, last))
            for name, parameter in stage.named_parameters():
                tied = name == "lm_head.weight" and architecture.tie_word_embeddings
                source = "embed_tokens.weight" if tied else name
                parameter.copy_(weights[family.Model.tensor_name(source)])
            x = stage(x)
        assert torch.equal(x, whole(tokens))


PUBLISHED = {
    "bloom-560m": 559_214_592,
    "gpt2-345m": 354_823_168,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "starcoderbase-1b": 1_137_207_296,
    "starcoder-15b": 15_517_456_384,
}
"""Number of parameters on the pages of these models."""

BILLIONS = {
    "gpt3-1.7b": "1.7",
    "gpt3-3.6b": "3.6",
    "gpt3-7.5b": "7.5",
    "gpt3-18.4b": "18.4",
    "gpt3-39.1b": "39.1",
    "gpt3-76.1b": "76.1",
    "gpt3-145.6b": "145.6",
    "gpt3-310.1b": "310.1",
    "gpt3-175b": "175",
}
"""Parameters in table 1 of arXiv 2104.04473; for the last, in arXiv 2005.14165."""


def num_parameters(name: str) -> int:
    shape = read_architecture(MODELS / f"{name}.yaml")
    shape = shape.model_copy(update={"vocab_size": shape.vocab_size or 8192})
    assert config_json.format_for(shape)
    return sum(map(math.prod, shapes(shape).values()))


def test_published_sizes_have_the_published_number_of_parameters() -> None:
    assert {name: num_parameters(name) for name in PUBLISHED} == PUBLISHED
    for name, billions in BILLIONS.items():
        decimals = len(billions.partition(".")[2])
        assert f"{num_parameters(name) / 1e9:.{decimals}f}" == billions
    assert num_parameters("tiny-gpt") == 3_451_008
    assert num_parameters("tiny-llama") == 4_769_472
    families = {path.stem: read_architecture(path).family for path in MODELS.glob("*.yaml")}
    sized = {name for name, family in families.items() if family in ("gpt", "llama")}
    assert sized == {*PUBLISHED, *BILLIONS, "tiny-gpt", "tiny-llama"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"family": "llama", "position_embedding": "learned"}, "llama has rotary only"),
        ({"family": "llama", "hidden_act": "gelu"}, "hidden_act: 'gelu': llama has silu only"),
        ({"family": "llama", "layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-06: llama does"),
        ({"family": "llama", "embedding_layernorm": True}, "embedding_layernorm: True: llama does"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06: gpt does not know it; remove"),
        ({"hidden_act": "silu"}, "'silu': gpt has gelu_new or gelu or gelu_pytorch_tanh or relu"),
        ({"rope_theta": 5e5}, "rope_theta and rope_scaling belong to position_embedding"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}},
            "belong to position_embedding rotary, not learned; remove them",
        ),
        (
            {"position_embedding": "rotary", "num_attention_heads": 16, "hidden_size": 48},
            "is odd; rotary needs pairs",
        ),
        (
            {"position_embedding": "rotary", "rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "rope_type yarn needs original_max_position_embeddings; add it",
        ),
        (
            {
                "position_embedding": "rotary",
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "original_max_position_embeddings": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                },
            },
            "high_freq_factor is not greater than low_freq_factor",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_a_family_does_not_know_are_refused(
    values: dict[str, Any], message: str
) -> None:
    plain = {
        "family": "gpt",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    if values.get("num_attention_heads"):
        plain["num_key_value_heads"] = 16
    with pytest.raises(UserError, match=message) as error:
        validate(Architecture, plain | values, "x.yaml")
    assert str(error.value).startswith("x.yaml: ")
    assert "\n" not in str(error.value)


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
    ALIBI.check_context_parallel(1)
    LEARNED.check_context_parallel(2)
    with pytest.raises(UserError, match=r"context_parallel_size: 2: .* set 1"):
        ALIBI.check_context_parallel(2)


SHARED = {
    "learned": LEARNED,
    "untied": gpt(tie_word_embeddings=False),
    "mqa": MQA,
    "gqa-rotary": ROTARY,
    "alibi": ALIBI,
    "plain": gpt(attention_bias=False, mlp_bias=False, position_embedding="rotary"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_tensor_parallel_ranks_equal_one_process(world_size: int) -> None:
    assert_tensor_parallel_equals_one_process(SHARED, world_size)


def context_parallel(method: Any) -> dict[str, Any]:
    """Logits of this rank's tokens."""
    axis = Axis(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    mesh = Mesh(context=axis, context_method=method)
    logits = {}
    for name in ("learned", "mqa", "gqa-rotary"):
        model = family.Model(SHARED[name], mesh)
        for key, parameter in model.named_parameters():
            parameter.data = random_tensors(SHARED[name], 1)[family.Model.tensor_name(key)]
        with torch.no_grad():
            logits[name] = model(share(tokens_of(SHARED[name], 32), axis=axis))
    return logits


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_parallel_ranks_equal_one_process(method: str) -> None:
    for rank, logits_of in enumerate(spawn(context_parallel, 2, method)):
        for name, logits in logits_of.items():
            with torch.no_grad():
                all_logits = to_model(SHARED[name], random_tensors(SHARED[name], 1))(
                    tokens_of(SHARED[name], 32)
                )
            expected = share(all_logits, axis=Axis(rank, 2))
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
