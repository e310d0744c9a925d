"""Published sizes of models: each architecture file has the published number of parameters."""

import math

import pytest
import torch

from tests.support import t5s
from tests.support.paths import ROOT
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.model_tensors import shapes
from tokamake.config.architecture import Architecture
from tokamake.config.architecture_files import read_architecture

MODELS = ROOT / "config/models"
PUBLISHED = {
    "bloom-560m": 559_214_592,
    "gpt2-124m": 124_439_808,
    "gpt2-345m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "starcoderbase-1b": 1_137_207_296,
    "starcoder-15b": 15_517_456_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "upcycled-qwen3-2.4b": 596_049_920 + 28 * (7 * 3 * 3072 + 16) * 1024,
    # transformers does not count the biases of routers: 14,848 and 5,760.
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352 + 14_848,
    "glm-4.5-air": 106_852_245_504 + 5_760,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "smollm3-3b": 3_075_098_624,
    "phi-3-mini": 3_821_079_552,
    "phi-4-14b": 14_659_507_200,
    "pythia-160m": 162_322_944,
    "pythia-1.4b": 1_414_647_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "tiny-gpt": 3_451_008,
    "tiny-llama": 4_769_472,
    "tiny-qwen3": 4_917_440,
    "tiny-mixtral": 4_769_472 + 4 * (3 * 192 * (8 * 256 - 512) + 8 * 192),
    # transformers' BertForPreTraining: its norm of the embeddings has as many as our last norm.
    "bert-345m": 336_226_108,
    "bert-base": 110_106_428,
    "tiny-biencoder": 1_478_400,
    "biencoder-base": 183_484_416,  # 217,783,296 with BERT's 30,522 tokens
    "tiny-retro": 6_245_376,
    "retro-2b": 1_884_262_400,  # 1,970,411,520 with GPT-2's 50,257 tokens
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-220m": 222_421_920,
}
"""Number of parameters on the pages of these models, or that transformers counts."""
VOCABULARIES = {"bert": 30522, "hf_t5": 32128, "t5": 30522 + 102}
"""By family, where a file states none; 8192 for other families."""
BILLIONS = {
    "gpt3-1.7b": "1.7",
    "gpt3-3.6b": "3.6",
    "gpt3-7.5b": "7.5",
    "gpt3-18.4b": "18.4",
    "gpt3-39.1b": "39.1",
    "gpt3-76.1b": "76.1",
    "gpt3-145.6b": "145.6",
    "gpt3-310.1b": "310.1",
    "gpt3-175b": "175",
}
"""Parameters in table 1 of arXiv 2104.04473; for the last, in arXiv 2005.14165."""


def published_shape(name: str) -> Architecture:
    shape = read_architecture(MODELS / f"{name}.yaml")
    vocabulary = VOCABULARIES.get(shape.family, 8192)
    return shape.model_copy(update={"vocab_size": shape.vocab_size or vocabulary})


def test_published_sizes_have_the_published_number_of_parameters() -> None:
    sizes = {}
    for name in (path.stem for path in MODELS.glob("*.yaml")):
        shape = published_shape(name)
        assert shape.has_neighbors or config_json.format_for(shape)
        sizes[name] = sum(map(math.prod, shapes(shape.without_mtp).values()))
    rounded = {
        name: f"{sizes.pop(name) / 1e9:.{len(billions.partition('.')[2])}f}"
        for name, billions in BILLIONS.items()
    }
    assert (sizes, rounded) == (PUBLISHED, BILLIONS)
    with torch.device("meta"):
        theirs = sum(
            each.numel() for each in t5s.reference(published_shape("t5-220m")).parameters()
        )
    assert theirs == PUBLISHED["t5-220m"]


WITH_FURTHER_LAYERS = {"deepseek-v3": 684_489_845_504, "glm-4.5-air": 110_468_824_832}
"""Numbers of the hub: it counts the copies of the embedding and the output in the MTP layer, and of
DeepSeek-V3 also 41,540,496 scales of fp8 weights."""


@pytest.mark.parametrize("name", WITH_FURTHER_LAYERS)
def test_files_with_a_further_layer_have_the_published_number_of_parameters(name: str) -> None:
    shape = published_shape(name)
    assert shape.num_mtp_layers == 1
    by_name = shapes(shape)
    copies = 2 * math.prod(by_name["model.embed_tokens.weight"])
    assert sum(map(math.prod, by_name.values())) + copies == WITH_FURTHER_LAYERS[name]
