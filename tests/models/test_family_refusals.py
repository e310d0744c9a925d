"""Settings, layouts and uses that families of models refuse."""

from typing import Any

import pytest

from tests.support import berts, biencoders, gpts, qwens, retros, t5s
from tests.support.families import changed_settings, family_of
from tokamake.config.architecture import Architecture
from tokamake.config.parallel import ParallelSettings
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.inference.layout import WHOLE_MODEL

BERT, T5 = berts.ARCHITECTURES["bert"], t5s.ARCHITECTURES["t5"]
HF_T5, QWEN3 = t5s.HF_ARCHITECTURES["hf_t5"], qwens.ARCHITECTURES["qwen3"]
BIENCODER = biencoders.ARCHITECTURES["biencoder"]
RETRO = retros.ARCHITECTURES["retro-gpt"]
LLAMA = {**gpts.LEARNED.model_dump(include={"vocab_size", "hidden_size", "num_hidden_layers"})}


LLAMA |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
LLAMA_SHAPE = Architecture(**LLAMA)


LINEAR = {"rope_type": "linear", "factor": 2}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2,
    "original_max_position_embeddings": 8,
    "low_freq_factor": 4,
    "high_freq_factor": 4,
}


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        (LLAMA_SHAPE, {"position_embedding": "learned"}, "llama has rotary only"),
        (LLAMA_SHAPE, {"hidden_act": "gelu"}, "hidden_act: 'gelu': llama has silu only"),
        (LLAMA_SHAPE, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-06: llama does"),
        (LLAMA_SHAPE, {"embedding_layernorm": True}, "embedding_layernorm: True: llama does"),
        (gpts.LEARNED, {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06: gpt does not know it; rem"),
        (gpts.LEARNED, {"hidden_act": "silu"}, "'silu': gpt has gelu_new or gelu or gelu_pytorch"),
        (gpts.LEARNED, {"rope_theta": 5e5}, "rope_theta and rope_scaling belong to position_emb"),
        (gpts.LEARNED, {"rope_scaling": LINEAR}, "position_embedding rotary, not learned; remove"),
        (
            gpts.LEARNED,
            {"position_embedding": "rotary", "num_attention_heads": 16, "hidden_size": 48},
            "is odd; rotary needs pairs",
        ),
        (
            gpts.ROTARY,
            {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "rope_type yarn needs original_max_position_embeddings; add it",
        ),
        (gpts.ROTARY, {"rope_scaling": LLAMA3}, "high_freq_factor is not greater than low_freq"),
        *(
            (QWEN3, {name: True}, f"{name}: True: qwen3 does not know it; remove it")
            for name in ("attention_bias", "mlp_bias", "embedding_layernorm")
        ),
        (BERT, {"hidden_act": "silu"}, "hidden_act: 'silu': bert has gelu or gelu_new"),
        (BERT, {"head_act": "tanh"}, "head_act: 'tanh': bert has gelu or gelu_new"),
        (BERT, {"tie_word_embeddings": False}, "tie_word_embeddings: False: bert has True only"),
        (BERT, {"position_embedding": "rotary"}, "'rotary': bert has learned only"),
        (BERT, {"type_vocab_size": -1}, "type_vocab_size: -1: bert has 2 or 0"),
        (BERT, {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06: bert does not know it; remove"),
        (T5, {"hidden_act": "silu"}, "hidden_act: 'silu': t5 has gelu or gelu_new"),
        (T5, {"tie_word_embeddings": False}, "tie_word_embeddings: False: t5 has True only"),
        (T5, {"position_embedding": "rotary"}, "'rotary': t5 has learned only"),
        (T5, {"num_decoder_layers": -1}, "num_decoder_layers: -1: too small; give 1 or more"),
        (T5, {"num_decoder_layers": "two"}, "num_decoder_layers: 'two': needs a value of type int"),
        (T5, {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06: t5 does not know it; remove"),
        (HF_T5, {"hidden_act": "relu"}, "hidden_act: 'relu': hf_t5 has gelu_new or silu only"),
        (HF_T5, {"position_embedding": "learned"}, "'learned': hf_t5 has relative only"),
        (HF_T5, {"attention_bias": True}, "attention_bias: True: hf_t5 does not know it; remove"),
    ],
    ids=changed_settings,
)
def test_settings_that_the_family_does_not_know_are_refused(
    architecture: Architecture, values: dict[str, Any], message: str
) -> None:
    if heads := values.get("num_attention_heads"):
        values = values | {"num_key_value_heads": heads, "head_dim": None}
    with pytest.raises(UserError, match=message) as error:
        validate(Architecture, {**architecture.model_dump(), **values}, "x.yaml")
    assert str(error.value).startswith("x.yaml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        (BERT, "context_parallel_size"),
        *(
            (each, f"{axis}_parallel_size")
            for each in (T5, HF_T5, BIENCODER, RETRO)
            for axis in ("pipeline", "context")
        ),
    ],
    ids=family_of,
)
def test_pipelines_and_split_sequences_are_refused(architecture: Architecture, name: str) -> None:
    settings = ParallelSettings(**{name: 2})
    with pytest.raises(UserError, match=rf"{name}: 2: .*{architecture.family}.*; set 1"):
        settings.check_architecture(architecture, 32)


@pytest.mark.parametrize(
    ("architecture", "objective", "kind"),
    [
        (BERT, "masked", "an encoder"),
        (T5, "span_corruption", "an encoder-decoder"),
        (BIENCODER, "ict", "a biencoder"),
    ],
    ids=family_of,
)
def test_text_cannot_be_continued(architecture: Architecture, objective: str, kind: str) -> None:
    assert architecture.objectives == (objective,)
    family = architecture.family
    with pytest.raises(UserError, match=f"family {family}, {kind}, which cannot continue"):
        WHOLE_MODEL.check(architecture, world_size=1)
