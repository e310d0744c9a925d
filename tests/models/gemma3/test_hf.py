"""Windows and rotary positions of older config.json files, as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.dense import dense
from tokamake.checkpoint.hf import config_json

SHAPE = dense("gemma3", num_hidden_layers=7, full_attention_interval=3, sliding_window=9)
NEWER = ("rope_parameters", "layer_types", "sliding_window_pattern", "rope_local_base_freq")
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("gemma3_text", {"rope_theta": 3000.0, "rope_scaling": LINEAR}),
        ("gemma3_text", {"rope_local_base_freq": 70.0, "sliding_window_pattern": 2}),
        ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR | {"rope_theta": 5e5}}}),
        ("olmo3", {"rope_theta": 3000.0, "rope_scaling": YARN}),
        ("olmo3", {"rope_theta": 500000.0}),
    ],
)
def test_older_files_are_read_as_transformers_reads_them(
    config: Path, kind: str, values: dict[str, Any]
) -> None:
    from transformers import AutoConfig

    kept = {key: value for key, value in json.loads(config.read_text()).items() if key not in NEWER}
    stated = {**kept, "rope_theta": 2000.0, "hidden_act": "silu", "model_type": kind, **values}
    config.write_text(json.dumps(stated))
    ours = config_json.read_config(config.parent)[0]
    theirs = AutoConfig.from_pretrained(config.parent)
    full, local = (theirs.rope_parameters[f"{each}_attention"] for each in ("full", "sliding"))
    assert (ours.rope_theta, ours.local_rope_theta) == (full["rope_theta"], local["rope_theta"])
    scaling = ours.rope_scaling.model_dump(exclude_none=True) if ours.rope_scaling else {}
    assert scaling.get("rope_type", "default") == full["rope_type"]
    assert scaling.get("factor") == full.get("factor")
    windows = [ours.window(layer) is not None for layer in range(7)]
    assert windows == [each == "sliding_attention" for each in theirs.layer_types]
