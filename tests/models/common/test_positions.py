"""Rotary frequencies equal transformers' for each kind of scaling; ALiBi equals the paper's."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import hf_folder
from tests.support.cached import decoded
from tests.support.llamas import ARCHITECTURES, reference, tensors_of
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.models.common.positions import alibi, alibi_slopes, rotary, rotary_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": LONGROPE,
    "longrope-factor": LONGROPE | {"attention_factor": 1.2},
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.6, "truncate": False},
    "yarn-step": YARN | {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
}


def scaled(scaling: dict[str, Any] | None, **values: Any) -> Architecture:
    shape = ARCHITECTURES[5].model_dump() | {"max_position_embeddings": 128} | values
    return Architecture(**(shape | {"rope_scaling": with_factors(scaling, shape["hidden_size"])}))


def with_factors(scaling: dict[str, Any] | None, hidden_size: int) -> dict[str, Any] | None:
    """Add factors of longrope for 4 heads: a short and a long one for each frequency."""
    if scaling is None or scaling["rope_type"] != "longrope":
        return scaling
    numbers = range(hidden_size // 8)
    short, long = ([1 + by * number for number in numbers] for by in (0.01, 0.3))
    return scaling | {"short_factor": short, "long_factor": long}


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize(
    ("name", "longer"), [*((name, False) for name in SCALINGS), ("longrope", True)]
)
def test_frequencies_and_attention_factor_equal_transformers(
    name: str, longer: bool, width: int
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = with_factors(SCALINGS[name], 4 * width)
    architecture = scaled(scaling, hidden_size=4 * width)
    longest = 33 if longer else 32
    frequencies, factor = rotary_frequencies(architecture, longest=longest)
    rope = {"rope_type": "default", "rope_theta": architecture.rope_theta} | (scaling or {})
    config = LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters=dict(rope),
    )
    if scaling is None:
        expected = architecture.rope_theta ** -(torch.arange(0, width, 2).double() / width)
        expected, expected_factor = expected.float(), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=longest)
        assert name == "dynamic" or not torch.allclose(
            frequencies, rotary_frequencies(scaled(None, hidden_size=4 * width))[0]
        )
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_equal_transformers_and_configs_round_trip(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    architecture = scaled(SCALINGS[name])
    oracle = reference(architecture)
    tokens = torch.randint(131, (2, 128), generator=torch.Generator().manual_seed(1))
    model = to_model(architecture, tensors_of(oracle, architecture))
    with torch.no_grad():
        expected = oracle(tokens).logits
        assert (model(tokens) - expected).abs().max() <= 1e-5
    oracle.save_pretrained(tmp_path / "by_transformers")
    stored, tensors = hf_folder.read(tmp_path / "by_transformers")
    assert stored == architecture
    hf_folder.write(tmp_path / "by_tokamake", stored, tensors)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "by_tokamake").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected)
    assert config_json.read_config(tmp_path / "by_tokamake")[0] == architecture


@pytest.mark.parametrize("length", [32, 33])
def test_longrope_takes_the_factors_of_the_longest_row_that_may_come(length: int) -> None:
    architecture = scaled(LONGROPE)
    oracle, tokens = reference(architecture), torch.arange(length)[None]
    model = to_model(architecture, tensors_of(oracle, architecture))
    with torch.no_grad():
        expected = oracle(tokens).logits
        assert (model(tokens) - expected).abs().max() <= 1e-5
        # A cache has the capacity for all tokens from the start.
        assert (decoded(model, tokens, [length - 2, 1, 1]) - expected).abs().max() <= 1e-5


def test_positions_may_differ_from_row_to_row() -> None:
    architecture = scaled(YARN)
    positions = torch.tensor([[0, 1, 2], [5, 0, 1]])
    for by_row, of_one_row in zip(
        rotary(positions, architecture), rotary(positions[1], architecture), strict=True
    ):
        assert by_row.shape == (2, 1, 3, 16)
        assert torch.equal(by_row[1, 0], of_one_row)


def test_slopes_equal_the_papers() -> None:
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(16) == [2 ** (-n / 2) for n in range(1, 17)]
    # The paper's code for 12 heads: those of 8, then every other one of 16.
    assert alibi_slopes(12) == [*alibi_slopes(8), *alibi_slopes(16)[:8:2]]
    assert alibi_slopes(1) == [2.0**-8]


@pytest.mark.parametrize("heads", [range(6), range(3, 6)], ids=str)
def test_bias_falls_with_distance_and_hides_later_tokens(heads: range) -> None:
    like, length, total = torch.zeros(1), 4, 7
    positions = torch.arange(total - length, total)
    bias = alibi(6, heads, positions=positions, total=total, like=like, mask=None)
    assert bias.shape == (1, len(heads), length, total)
    for place, head in enumerate(heads):
        for query in range(length):
            for key in range(total):
                distance = query + total - length - key
                expected = -alibi_slopes(6)[head] * distance if distance >= 0 else -math.inf
                assert bias[0, place, query, key] == pytest.approx(expected)


def test_rows_have_positions_of_their_own() -> None:
    positions, like = torch.tensor([[2, 3], [4, 5]]), torch.zeros(1)
    bias = alibi(2, range(2), positions=positions, total=6, like=like, mask=None)
    for row, own in enumerate(positions):
        alone = alibi(2, range(2), positions=own, total=6, like=like, mask=None)
        assert torch.equal(bias[row], alone[0])


def test_bias_hides_other_documents() -> None:
    mask = torch.tensor([[[[True, False], [True, True]]], [[[True, False], [False, True]]]])
    like = torch.zeros(1).bfloat16()
    bias = alibi(2, range(2), positions=torch.arange(2), total=2, like=like, mask=mask)
    assert bias.shape == (2, 2, 2, 2)
    assert bias.dtype == torch.bfloat16
    assert torch.equal(bias.isinf(), ~mask.expand(-1, 2, -1, -1))
