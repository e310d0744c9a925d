"""Layers without positions in config.json: a list and an interval, read and written."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.dense import dense
from tokamake.checkpoint.hf import config_json

SHAPE = dense("smollm3", num_hidden_layers=5, no_rope_layer_interval=2)
KEYS = ("no_rope_layers", "no_rope_layer_interval")


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        ({}, 4),
        ({"no_rope_layer_interval": 3}, 3),
        ({"no_rope_layers": [1, 1, 0, 1, 1]}, 3),
        # transformers reads the list, not the interval; further entries are of no layer.
        ({"no_rope_layers": [1, 0, 1, 0, 1, 1], "no_rope_layer_interval": 3}, 2),
        ({"no_rope_layers": [1, 1, 1, 1, 1]}, 0),
        ({"no_rope_layers": [0, 0, 0, 0, 0]}, 1),
    ],
    ids=str,
)
def test_the_list_counts_before_the_interval(
    config: Path, values: dict[str, Any], interval: int
) -> None:
    stated = json.loads(config.read_text())
    assert stated["no_rope_layers"] == [1, 0, 1, 0, 1]
    kept = {key: value for key, value in stated.items() if key not in KEYS}
    config.write_text(json.dumps(kept | values))
    architecture = config_json.read_config(config.parent)[0]
    assert architecture.setting("no_rope_layer_interval") == interval
    rotating = [int(architecture.rotates(layer)) for layer in range(5)]
    assert rotating == values.get("no_rope_layers", rotating)[:5]
