"""Shapes that hf.py states without torch equal those of the model."""

import pytest

from tests.support import berts, dense, gpts, llamas, qwens, t5s
from tests.support.families import named_tensors
from tokamake.checkpoint import model_tensors
from tokamake.config.architecture import Architecture

MODELS = [
    *llamas.ARCHITECTURES,
    llamas.BIASED,
    llamas.WIDE_HEADS,
    *gpts.ARCHITECTURES.values(),
    *qwens.ARCHITECTURES.values(),
    *dense.ARCHITECTURES.values(),
    *berts.ARCHITECTURES.values(),
    *t5s.ARCHITECTURES.values(),
    *t5s.HF_ARCHITECTURES.values(),
    dense.latent(num_nextn_predict_layers=2),
    dense.dense("glm4_moe", num_nextn_predict_layers=1, **dense.SHARED_EXPERTS),
]


@pytest.mark.parametrize("architecture", MODELS, ids=str)
def test_shapes_are_those_of_the_model_in_its_order(architecture: Architecture) -> None:
    model = named_tensors(model_tensors._empty_model(architecture))
    tensor_shapes = model_tensors.shapes(architecture)
    assert [*tensor_shapes.items()] == [
        (name, tuple(tensor.shape)) for name, tensor in model.items()
    ]
