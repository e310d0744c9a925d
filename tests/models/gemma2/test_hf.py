"""Keys of a gemma2's config.json that are absent, null or of another name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.dense import dense
from tokamake.checkpoint.hf import config_json

SHAPE = dense("gemma2", num_hidden_layers=4, sliding_window=9, query_pre_attn_scalar=20.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"attn_logit_softcapping": None}, {"attn_logit_softcapping": 0.0}),
        ({"final_logit_softcapping": "absent"}, {"final_logit_softcapping": 30.0}),
        ({"query_pre_attn_scalar": "absent"}, {"query_pre_attn_scalar": 256.0}),
        ({"sliding_window": "absent", "layer_types": "absent"}, {"sliding_window": 4096}),
        # Early files have both names of the activation; transformers reads the longer one.
        ({"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh"}),
    ],
    ids=str,
)
def test_keys_have_the_defaults_of_transformers(
    config: Path, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    stated = json.loads(config.read_text())
    assert stated["query_pre_attn_scalar"] == 20
    kept = {key: value for key, value in (stated | values).items() if value != "absent"}
    config.write_text(json.dumps(kept))
    assert config_json.read_config(config.parent)[0] == SHAPE.model_validate(
        SHAPE.model_dump() | expected
    )
