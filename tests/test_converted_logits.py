"""A model computes the same in every format: transformers' logits are the measure."""

from pathlib import Path

import pytest
import torch
from test_convert import FAMILIES, weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from tokamake.checkpoint import hugging_face, tensors
from tokamake.checkpoint.any_format import open_any
from tokamake.checkpoint.convert import convert

FORMS = {
    "mds": {"tensor_parallel_size": 2},
    "mds-pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "universal": {"pipeline_parallel_size": 2},
    "megatron": {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_pipeline_size": 2,
    },
    "native": {},
}  # fmt: skip


def of_transformers(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(48).view(2, 24)).logits


def of_the_trainer(folder: Path) -> Tensor:
    """Logits of the model that training would start from, read tensor by tensor."""
    opened = open_any(folder)
    read = {key.removeprefix("model."): opened.source.read(key) for key in opened.source}
    with torch.no_grad():
        return tensors.to_model(opened.architecture, read).eval()(torch.arange(48).view(2, 24))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_after_every_conversion(
    family: str, tmp_path: Path
) -> None:
    architecture = FAMILIES[family]
    small = {name: 0.1 * each for name, each in weights(architecture, torch.float32).items()}
    hugging_face.write(tmp_path / "start", architecture, small)
    expected = of_transformers(tmp_path / "start")
    assert expected.std() > 0.01
    for format, sizes in FORMS.items():
        there, back = tmp_path / format, tmp_path / f"{format}-hf"
        convert(source=tmp_path / "start", target=there, format=format, **sizes)  # type: ignore
        torch.testing.assert_close(of_the_trainer(there), expected, rtol=0, atol=1e-5)
        convert(source=there, target=back, format="hf")
        assert torch.equal(of_transformers(back), expected)
