"""A random model with confident, varied predictions; and the same model as transformers has it."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.support.llamas import write_confident
from tokamake.checkpoint.detect import open_any
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.layout import WHOLE_MODEL, Peers
from tokamake.inference.model import InferenceModel
from tokamake.runtime.ranks import Ranks

CONTEXT = 48


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 100 tokens and a context of 48."""
    folder = tmp_path_factory.mktemp("llama")
    return write_confident(folder, vocab_size=100, context=CONTEXT)


@pytest.fixture(scope="package")
def oracle(llama: Path) -> transformers.LlamaForCausalLM:
    """The model as transformers reads it."""
    return transformers.LlamaForCausalLM.from_pretrained(llama).eval()


@pytest.fixture(scope="package")
def driven(llama: Path) -> DrivenModel:
    """The model on one rank."""
    alone = Peers(Ranks(0, 1, 0, 1), torch.device("cpu"))
    return DrivenModel(InferenceModel(open_any(llama), WHOLE_MODEL, peers=alone), 1)
