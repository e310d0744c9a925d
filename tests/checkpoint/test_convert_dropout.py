"""Rates of dropout are carried over between formats, under the names of each."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import hf_folder
from tests.support.berts import bert
from tests.support.families import FAMILIES, weights
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.hf import format as hf_format
from tokamake.errors import UserError

MEGATRON_FILES = {
    "mds": "global_step0/mp_rank_00_model_states.pt",
    "mds-pipeline": "global_step0/mp_rank_00_model_states.pt",
    "universal": "global_step0_universal/mp_rank_00_model_states.pt",
    "megatron": "iter_0000000/mp_rank_00/model_optim_rng.pt",
    "torch-dist": "iter_0000000/common.pt",
}
"""Files with Megatron's arguments."""


@pytest.mark.parametrize("kind", MEGATRON_FILES)
def test_megatrons_arguments_have_the_dropout_of_the_training(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways, also from arguments that Megatron wrote."""
    architecture = FAMILIES["gpt2"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    rates = {"resid_pdrop": 0.2, "attn_pdrop": 0.1, "embd_pdrop": 0.3}
    (tmp_path / "hf/config.json").write_text(json.dumps(config | rates))
    convert(source=tmp_path / "hf", target=tmp_path / "a", format=kind)
    assert "no argument for dropout of the embedding, here 0.3" in capsys.readouterr().err
    file = tmp_path / "a" / MEGATRON_FILES[kind]
    state = torch.load(file, weights_only=False)
    args = state["args"]
    assert (args.hidden_dropout, args.attention_dropout) == (0.2, 0.1)
    convert(source=tmp_path / "a", target=tmp_path / "b", format="hf")
    assert rates.items() <= json.loads((tmp_path / "b/config.json").read_text()).items()
    # As Megatron writes it, it has one rate for hidden states and embedding.
    del args.dropout
    torch.save(state, file)
    expected = {"hidden": 0.2, "attention": 0.1, "embedding": 0.2}
    assert open_any(tmp_path / "a").notes["dropout"] == expected
    args.hidden_dropout = "high"
    torch.save(state, file)
    with pytest.raises(UserError, match=r"args\.hidden_dropout: 'high': not a rate; correct it"):
        open_any(tmp_path / "a")


def test_dropout_that_transformers_has_no_key_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = FAMILIES["llama"]
    hf_folder.write(tmp_path / "hf", architecture, weights(architecture))
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="megatron")
    file = tmp_path / "a" / MEGATRON_FILES["megatron"]
    state = torch.load(file, weights_only=False)
    state["args"].hidden_dropout, state["args"].attention_dropout = 0.2, 0.1
    torch.save(state, file)
    capsys.readouterr()
    convert(source=tmp_path / "a", target=tmp_path / "b", format="hf")
    assert capsys.readouterr().err.splitlines() == [
        f"transformers' llama has no key for {name} dropout, here 0.2: a training there uses 0"
        for name in ("embedding", "hidden")
    ]
    assert json.loads((tmp_path / "b/config.json").read_text())["attention_dropout"] == 0.1
    convert(source=tmp_path / "b", target=tmp_path / "c", format="hf")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("embedding", "warnings"), [(0.2, 0), (0.3, 1)])
def test_bert_of_transformers_drops_the_embedding_as_hidden_states(
    embedding: float, warnings: int
) -> None:
    rates = {"hidden": 0.2, "attention": 0.1, "embedding": embedding}
    checkpoint: Any = SimpleNamespace(architecture=bert(), notes={"dropout": rates})
    assert len(hf_format.warnings(checkpoint)) == warnings


def test_megatrons_arguments_state_that_nothing_is_dropped(tmp_path: Path) -> None:
    """Megatron's default is 0.1."""
    hf_folder.write(tmp_path / "hf", FAMILIES["llama"], weights(FAMILIES["llama"]))
    convert(source=tmp_path / "hf", target=tmp_path / "a", format="megatron")
    args = torch.load(tmp_path / "a" / MEGATRON_FILES["megatron"], weights_only=False)["args"]
    assert (args.hidden_dropout, args.attention_dropout) == (0.0, 0.0)
    assert "dropout" not in open_any(tmp_path / "a").notes
