"""From Hugging Face to Megatron's layouts and back: every tensor's sha256, for every family."""

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support import berts, dense, gpts, hf_folder, llamas, qwens, t5s
from tests.support.grids import cover, params
from tests.support.random_tensors import random_tensors
from tokamake import plugins
from tokamake.checkpoint import model_tensors, writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

KINDS = {
    **gpts.ARCHITECTURES,
    **{f"llama-kv{each.num_key_value_heads}": each for each in llamas.ARCHITECTURES},
    "llama-biased": llamas.BIASED,
    "llama-wide-heads": llamas.WIDE_HEADS,
    "qwen3": qwens.ARCHITECTURES["qwen3"],
    **{name: dense.ARCHITECTURES[name] for name in ("mistral", "qwen2", "smollm3", "phi3")},
    **berts.ARCHITECTURES,
    **t5s.ARCHITECTURES,
}
"""A model of each kind that the trainer has, too small for many ranks."""
VOCABULARIES = (131, 1025, 1024)
"""Padded on any ranks, padded to twice as many rows on 8, never padded."""


def grown(architecture: Architecture, vocab_size: int, *, tied: bool) -> Architecture:
    """Such a model in a size that 8 tensor-parallel ranks in 4 stages can share."""
    heads = 16 if architecture.num_attention_heads == 4 else 24  # no power of two, as of ALiBi
    groups = {1: 1, architecture.num_attention_heads: heads}
    is_usual = architecture.intermediate_size == 4 * architecture.hidden_size
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 4 * heads,
        "intermediate_size": 16 * heads if is_usual else 48,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": groups.get(architecture.num_key_value_heads, 8),
        "tie_word_embeddings": tied,
    }
    return Architecture(**{**architecture.model_dump(), **sizes})


def shapes() -> Iterator[tuple[str, Architecture]]:
    """Each kind, tied and not; vocabularies in turn."""
    seen: list[Architecture] = []
    sizes = cycle(VOCABULARIES)
    for (name, kind), tied in product(KINDS.items(), (True, False)):
        if not tied and not kind.is_causal:
            continue  # their output layer is always tied
        if (plain := grown(kind, 131, tied=tied)) in seen:
            continue  # kinds that differ in the tie alone
        seen.append(plain)
        shape = plain.model_copy(update={"vocab_size": next(sizes)})
        yield f"{name}-{'tied' if tied else 'untied'}-{shape.vocab_size}", shape


SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("num_hidden_layers", "head_dim"),
)
SHAPES = dict(shapes())
LAYOUTS = {
    "mds": [(tensor, 1) for tensor in (1, 2, 4, 8)],
    "mds_pipeline": [*product((1, 2, 4, 8), (1, 2, 4))],
    "megatron": [*product((1, 2, 4, 8), (1, 2, 4))],
    "torch_dist": [(1, 1)],
}
PARTS = [
    *((name, "first") for name in LAYOUTS),
    *(
        pytest.param(name, "others", marks=pytest.mark.grid)
        for name in LAYOUTS
        if len(LAYOUTS[name]) > 1
    ),
]
"""Formats, with the layouts of each."""


def possible_layouts(name: str, shape: Architecture) -> list[tuple[int, int]]:
    """Layouts that a format has of such a model."""
    if name == "mds_pipeline" and not shape.is_causal:
        return []  # Megatron-DeepSpeed has none
    if name == "megatron" and shape.has_decoder:
        return [(tensor, 1) for tensor in (1, 2, 4, 8)]
    return LAYOUTS[name]


def layouts_of(name: str, part: str, shape: str) -> list[tuple[int, int]]:
    """Layouts to test: the first one of a shape is the next one of a list; others are a third."""
    possible, place = possible_layouts(name, SHAPES[shape]), place_of(shape)
    if not possible:
        return []
    # Of 12 layouts, the numbers of ranks and of stages both change from shape to shape.
    first = possible[(4 * place + place // 3 if len(possible) > 4 else place) % len(possible)]
    others = [layout for layout in possible if layout != first]
    return [first] if part == "first" else others[place % 3 :: 3]


def place_of(shape: str) -> int:
    """Place of a shape among those of its part of the suite: each has all layouts in turn."""
    names = KEPT if shape in KEPT else [name for name in SHAPES if name not in KEPT]
    return names.index(shape)


def any_bits(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Finite numbers of any bits in bf16: zeros with signs, and those below the normal ones."""
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
    is_none = (bits & 0x7F80) == 0x7F80
    return torch.where(is_none, bits & ~0x4000, bits).view(torch.bfloat16)


def weights(architecture: Architecture) -> dict[str, torch.Tensor]:
    """By our names, always the same ones."""
    generator = torch.Generator().manual_seed(1)
    shapes = model_tensors.shapes(architecture)
    return {name: any_bits(shape, generator) for name, shape in shapes.items()}


def sums(folder: Path) -> dict[str, str]:
    """Format, shape and sha256 of each tensor of Hugging Face's, read by safetensors itself."""
    digests = {}
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118, it is no mapping
            tensor = opened.get_tensor(name)
            raw = tensor.view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(raw).hexdigest()
            digests[name] = f"{tensor.dtype} {[*tensor.shape]} {digest}"
    return digests


def features(name: str, shapes: Mapping[str, Architecture] = SHAPES) -> set[tuple[str, str, str]]:
    """What a family's tensors and files depend on, but for sizes."""
    shape = shapes[name]
    values = {
        **shape.model_dump(exclude={*SIZES}),
        "type": config_json.format_for(shape).model_type,
        "groups": shape.num_key_value_heads == shape.num_attention_heads,
        "wide": not shape.has_default_head_dim,
    }
    return {(shape.family, key, str(value)) for key, value in values.items()}


def values(name: str, shapes: Mapping[str, Architecture] = SHAPES) -> set[Hashable]:
    """Its family, and its features without the family: `make test` covers each once."""
    found = features(name, shapes)
    return {(key, value) for _, key, value in found} | {family for family, _, _ in found}


KEPT = cover(SHAPES, values)
"""Names of shapes that `make test` converts."""


@pytest.fixture(scope="module", params=params(SHAPES, KEPT))
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face checkpoint; do not write there."""
    folder = tmp_path_factory.mktemp("start") / request.param
    hf_folder.write(folder, SHAPES[request.param], weights(SHAPES[request.param]))
    return folder


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_layout_keeps_the_sha256_of_every_tensor(
    name: str, part: str, start: Path, tmp_path: Path
) -> None:
    checkpoint, known = open_any(start), sums(start)
    assert checkpoint.architecture == SHAPES[start.name]
    vocab_size = SHAPES[start.name].vocab_size
    assert vocab_size is not None
    for key, tensor in weights(checkpoint.architecture).items():
        assert torch.equal(checkpoint.source.read(f"model.{key}"), tensor), key
    for size, stages in layouts_of(name, part, start.name):
        folder, target = tmp_path / f"{size}-{stages}", Target(ParallelLayout(size, stages))
        assert writer.write(folder, checkpoint, name, target) == ([], [], "")
        written = open_any(folder)
        assert (written.format, written.layout) == (name, target.layout)
        assert written.architecture == checkpoint.architecture
        each = 128 * size
        assert written.padded_vocab_size == -(-vocab_size // each) * each
        writer.write(folder / "back", written, "hf", Target())
        assert sums(folder / "back") == known, (size, stages)
        configs = [(each / "config.json").read_text() for each in (start, folder / "back")]
        assert configs[0] == configs[1]


def test_every_model_type_is_tested_tied_and_untied() -> None:
    families = plugins.names("models/*/megatron")  # those that other formats have, too
    types = {
        stored.model_type
        for family in families
        for stored in plugins.load("models/*/hf", family).HUGGING_FACE
    }
    for tied in (True, False):
        shown = [each for each in SHAPES.values() if each.tie_word_embeddings == tied]
        others = set() if tied else {"megatron-bert", "blenderbot"}
        # tests/models converts models of several stacks.
        others |= {"megatron-bert-biencoder", "retro-rotary", "retro-learned", "retro-alibi"}
        # tests/models/common/test_megatron_experts.py converts experts.
        others |= {"mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss"}
        assert {config_json.format_for(each).model_type for each in shown} == types - others
        assert {each.position_embedding for each in shown} == {"learned", "rotary", "alibi"}
        gpt = {each.num_key_value_heads for each in shown if each.family == "gpt"}
        llama = {each.num_key_value_heads for each in shown if each.family == "llama"}
        assert llama == {1, 8, 16}
        assert gpt >= llama


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_cannot_share_heads_are_refused(name: str, tmp_path: Path) -> None:
    (shape,) = (SHAPES[each] for each in SHAPES if each.startswith("starcoder2-tied"))
    architecture = shape.model_copy(update={"num_key_value_heads": 2})
    hf_folder.write(tmp_path / "hf", architecture, random_tensors(architecture, 1))
    for tensor in (4, 8):
        with pytest.raises(UserError, match=f"{tensor}: does not divide num_key_value_heads 2"):
            writer.write(
                tmp_path / "a", open_any(tmp_path / "hf"), name, Target(ParallelLayout(tensor))
            )
    assert [each.name for each in tmp_path.iterdir()] == ["hf"]
