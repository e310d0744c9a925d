"""A random model with confident, varied predictions; and the same model as transformers has it."""

from pathlib import Path

import pytest
import torch
import transformers

from tokamake.checkpoint.detect import open_any
from tokamake.inference.layout import WHOLE_MODEL, Peers
from tokamake.inference.led_model import LedModel
from tokamake.inference.model import InferenceModel
from tokamake.runtime.ranks import Ranks

CONTEXT = 48


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 100 tokens and a context of 48."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def oracle(llama: Path) -> transformers.LlamaForCausalLM:
    """The model as transformers reads it."""
    return transformers.LlamaForCausalLM.from_pretrained(llama).eval()


@pytest.fixture(scope="package")
def led(llama: Path) -> LedModel:
    """The model on one rank."""
    alone = Peers(Ranks(0, 1, 0, 1), torch.device("cpu"))
    return LedModel(InferenceModel(open_any(llama), WHOLE_MODEL, peers=alone), 1)
