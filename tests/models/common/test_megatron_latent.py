"""Latent attention in Megatron's terms: arguments.

`tests/checkpoint/megatron/test_format.py` compares logits with megatron.core.
"""

import math
from typing import Any

import pytest
import torch

from tests.models.common.test_megatron_experts import read
from tests.support import dense
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common.megatron_latent import latent_arguments, latent_scaling
from tokamake.models.common.positions import rotary, yarn_score_factor

LATENT: dict[str, Any] = {
    "num_layers": 2,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "norm_epsilon": 1e-6,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "moe_router_pre_softmax": True,
    "rope_type": "rope",
}
BALANCED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
YARN = {"rope_type": None, "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8}


def test_arguments_become_settings_of_the_architecture() -> None:
    shape = read(**LATENT, kv_channels=128)
    assert (shape.family, shape.head_dim, shape.value_size) == ("deepseek_v2", 20, 40)
    assert (shape.setting("q_lora_rank"), shape.rope_scaling) == (24, None)
    shape = read(**{**LATENT, **BALANCED, "q_lora_rank": None})
    assert (shape.family, shape.setting("q_lora_rank")) == ("deepseek_v3", 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_epsilon", 1e-5),
        ("v_head_dim", None),
        ("moe_router_pre_softmax", False),
        ("rotary_interleaved", True),
        ("add_qkv_bias", True),
    ],
)
def test_arguments_of_another_model_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(
        UserError,
        match=rf"args\.{name}: {value!r}: means .*, which family deepseek_v2 does not have; ",
    ):
        read(**{**LATENT, name: value})


@pytest.mark.parametrize(
    ("mscale", "all_dims", "factor"),
    [
        # As megatron.core computes it: a formula with mscale over one with mscale_all_dim.
        (1.0, 0.0, 0.1 * math.log(4) + 1),
        (0.7, 0.0, 0.07 * math.log(4) + 1),
        (0.0, 1.3, 1 / (0.13 * math.log(4) + 1)),
        (0.7, 1.3, (0.07 * math.log(4) + 1) / (0.13 * math.log(4) + 1)),
    ],
)
def test_yarn_has_the_factor_of_cosines_of_megatron_core(
    mscale: float, all_dims: float, factor: float
) -> None:
    shape = read(**{**LATENT, **YARN, "mscale": mscale, "mscale_all_dim": all_dims})
    cos, _ = rotary(torch.zeros(1, 1), shape, torch.float64, longest=1)
    assert cos.flatten()[0].item() == pytest.approx(factor, rel=1e-6)
    of_scores = (0.1 * all_dims * math.log(4) + 1) ** 2
    assert yarn_score_factor(shape.rope_scaling) == pytest.approx(of_scores)


def test_a_factor_of_1_stretches_nothing() -> None:
    assert read(**{**LATENT, **YARN, "rotary_scaling_factor": 1.0}).rope_scaling is None


@pytest.mark.parametrize(
    ("scaling", "is_known"),
    [
        (None, False),
        (dense.YARN, True),
        (dense.YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0}, True),
        (dense.YARN | {"mscale": 0.7}, True),
        (dense.YARN | {"mscale_all_dim": 1.3}, False),
        (dense.YARN | {"mscale": 0.0, "mscale_all_dim": 1.3}, False),
        (dense.YARN | {"truncate": False}, False),
        (dense.YARN | {"attention_factor": 1.1}, False),
        ({"rope_type": "linear", "factor": 2.0}, False),
    ],
)
def test_written_scalings_are_read_back(scaling: dict[str, Any] | None, is_known: bool) -> None:
    values = dense.ARCHITECTURES["deepseek_v3"].model_dump()
    shape = Architecture(**{**values, "rms_norm_eps": 1e-6, "rope_scaling": scaling})
    assert bool(latent_scaling(shape)) == is_known
    arguments = latent_arguments(shape)
    assert arguments["rope_type"] == ("yarn" if is_known else "rope")
    if is_known:
        again = read(**{**LATENT, **BALANCED, **arguments, "rotary_base": 5000})
        places = torch.arange(60)[None]
        first, second = (rotary(places, each, torch.float64, longest=60) for each in (shape, again))
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
        factors = [yarn_score_factor(each.rope_scaling) for each in (shape, again)]
        assert factors[0] == factors[1]
        for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim"):
            assert again.setting(name) == shape.setting(name)
