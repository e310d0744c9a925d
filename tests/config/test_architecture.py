"""Settings of an architecture: those of its family, and those that earlier versions wrote."""

from typing import Any

import pytest

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config_files import validate
from tokamake.errors import UserError

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# What version 0.1.0 wrote into run.yaml, tokamake.json and args.tokamake: every field.
WRITTEN_BY_0_1 = {
    "vocab_size": 256,
    **SHAPE,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
    "layer_norm_epsilon": 1e-05,
    "embedding_layernorm": False,
    "initializer_range": 0.02,
}
FAMILIES_OF_0_1: dict[str, dict[str, Any]] = {
    "llama": {
        "position_embedding": "rotary",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "gpt": {
        "position_embedding": "learned",
        "hidden_act": "gelu_new",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}


@pytest.mark.parametrize("family", FAMILIES_OF_0_1)
def test_architectures_of_earlier_versions_are_read_and_written_unchanged(family: str) -> None:
    written = {"family": family, **WRITTEN_BY_0_1, **FAMILIES_OF_0_1[family]}
    # Digests of runs and arguments of checkpoints contain exactly these fields.
    assert Architecture(**written).model_dump() == written
    assert Architecture(family=family, vocab_size=256, **SHAPE).model_dump() == written


def test_unknown_keys_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"^x: hiden_act: unknown key; did you mean hidden_act\?"):
        validate(Architecture, SHAPE | {"hiden_act": "silu"}, "x")


@pytest.fixture
def llama_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give llama a setting that is no field of `Architecture`."""
    known = plugins.constant("models/*/model", "llama", "SETTINGS")
    gpt = plugins.constant("models/*/model", "gpt", "SETTINGS")
    settings = {"llama": {**known, "num_experts": 8}, "gpt": gpt}
    monkeypatch.setattr(
        plugins,
        "constant",
        lambda _, family, name, **__: settings[family] if name == "SETTINGS" else (),
    )


@pytest.mark.usefixtures("llama_with_experts")
def test_a_family_may_have_settings_of_its_own() -> None:
    assert Architecture(**SHAPE).setting("num_experts") == 8
    architecture = Architecture(**SHAPE, **{"num_experts": 4})
    assert architecture.setting("num_experts") == 4
    assert Architecture(**architecture.model_dump()) == architecture
    with pytest.raises(UserError, match=r"num_experts: 'many': needs a value of type int"):
        validate(Architecture, SHAPE | {"num_experts": "many"}, "x")
    with pytest.raises(UserError, match=r"num_experts: unknown key; "):
        validate(Architecture, SHAPE | {"family": "gpt", "num_experts": 8}, "x")


def test_head_dim_follows_from_the_rest_unless_stated() -> None:
    assert Architecture(**SHAPE).head_dim == 16
    assert Architecture(**SHAPE, head_dim=None) == Architecture(**SHAPE, head_dim=16)
    wide = Architecture(**SHAPE, head_dim=24)
    assert (wide.query_size, wide.key_value_size) == (96, 96)
    assert wide.model_dump()["head_dim"] == 24
    assert Architecture.model_validate_json(wide.model_dump_json()) == wide
    odd = SHAPE | {"hidden_size": 60, "num_attention_heads": 8, "num_key_value_heads": 8}
    assert Architecture(**odd, head_dim=8).query_size == 64
    with pytest.raises(
        UserError, match="hidden_size: 60: not a multiple of num_attention_heads 8; give 56 or 64"
    ):
        validate(Architecture, odd, "x")


@pytest.mark.parametrize(
    ("family", "hidden_size", "width"),
    [("llama", 4096, 11008), ("llama", 5120, 13824), ("llama", 64, 256), ("gpt", 1024, 4096)]
    + [(family, 768, 3072) for family in ("bert", "t5")],
)
def test_the_family_decides_the_width_of_mlps_and_the_key_heads(
    family: str, hidden_size: int, width: int
) -> None:
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": 2, "num_attention_heads": 16}
    for empty in ({}, {"intermediate_size": None, "num_key_value_heads": None, "head_dim": None}):
        shape = Architecture.model_validate({"family": family, **sizes, **empty})
        assert (shape.intermediate_size, shape.num_key_value_heads) == (width, 16)
    stated = Architecture.model_validate({"family": family, **sizes, "intermediate_size": 99})
    assert stated.intermediate_size == 99


@pytest.mark.parametrize("family", ["qwen3", "hf_t5"])
def test_families_without_a_rule_ask_for_the_width(family: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16}
    with pytest.raises(UserError, match="intermediate_size: missing"):
        validate(Architecture, {"family": family, **sizes}, "shape")
