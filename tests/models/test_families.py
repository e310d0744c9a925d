"""Properties that all families have: shapes, FLOPs, random weights, stages, refused settings."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support import berts, biencoders, dense, gpts, llamas, qwens, retros, t5s
from tests.support.cached import decoded
from tests.support.families import family_of, named_tensors
from tests.support.grids import params
from tests.support.hf_folder import from_hf
from tests.support.model_loss import mean_loss
from tests.support.model_ranks import (
    assert_tensor_parallel_equals_one_process,
    loss_of_tokens,
    tokens_of,
)
from tests.support.model_steps import assert_same_step
from tests.support.random_tensors import random_tensors
from tokamake import plugins
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.architecture import Architecture
from tokamake.models.common.language_model import predictions
from tokamake.models.common.recompute import Recompute
from tokamake.parallel.score_rules import ScoreRules

GPTS = [gpts.LEARNED, gpts.MQA, gpts.ROTARY, gpts.ALIBI]
BERT, T5 = berts.ARCHITECTURES["bert"], t5s.ARCHITECTURES["t5"]
HF_T5, QWEN3 = t5s.HF_ARCHITECTURES["hf_t5"], qwens.ARCHITECTURES["qwen3"]
BIENCODER = biencoders.ARCHITECTURES["biencoder"]
RETRO = retros.ARCHITECTURES["retro-gpt"]


def loss_of(architecture: Architecture, number: int, **lengths: int) -> Callable[[Any], Tensor]:
    """Loss of a model of random samples, as the trainer computes it."""
    if architecture.family == "bert":
        masked = berts.masked_samples(architecture, number=number, **lengths)
        return partial(berts.mean_loss, samples=masked)
    if architecture.has_towers:
        texts = biencoders.pairs(architecture, number=number, **lengths)
        return partial(biencoders.mean_loss, texts=texts)
    if architecture.has_decoder:
        decoder_length = lengths["length"] // 2 + 1
        spans = t5s.span_samples(
            architecture, number=number, decoder_length=decoder_length, **lengths
        )
        return partial(t5s.mean_loss, samples=spans)
    tokens = tokens_of(architecture, lengths["length"])
    loss = retros.loss_of if architecture.has_neighbors else mean_loss
    return partial(loss, tokens=tokens)


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize(
    "architecture", [gpts.ALIBI, BERT, T5, HF_T5, BIENCODER, RETRO], ids=family_of
)
def test_recomputing_changes_nothing(architecture: Architecture, granularity: Any) -> None:
    copies = {name: tensor.clone() for name, tensor in random_tensors(architecture, 1).items()}
    model, loss, gradients = to_model(architecture, copies), loss_of(architecture, 3, length=33), []
    for recompute in (Recompute(), Recompute(granularity)):
        model.set_recompute(recompute)
        model.zero_grad()
        loss(model).backward()
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})
    assert all(torch.equal(gradients[1][name], each) for name, each in gradients[0].items())


WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "initializer_range": 0.03}


@pytest.mark.parametrize(
    "architecture",
    [
        Architecture(**{**llamas.ARCHITECTURES[0].model_dump(), **WIDE}),
        gpts.gpt(**WIDE),
        berts.bert(**WIDE),
        biencoders.biencoder(**WIDE),
        retros.retro(num_hidden_layers=3, **WIDE),
        dense.dense("gemma3", **WIDE),
        t5s.t5(**WIDE),  # Megatron divides by the layers of the encoder, in both stacks.
    ],
    ids=family_of,
)
def test_random_weights_have_the_published_deviations(architecture: Architecture) -> None:
    for name, tensor in random_tensors(architecture, 1).items():
        if tensor.dim() == 1:
            norm = 0.0 if architecture.family == "gemma3" else 1.0
            value = norm if name.endswith("weight") else 0.0
            assert torch.equal(tensor, torch.full_like(tensor, value))
        elif len(tensor) > 2:
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = 0.03 / math.sqrt(2 * 3) if into_residual else 0.03
            assert abs(tensor.std().item() / deviation - 1) < 0.02
            assert abs(tensor.mean().item()) < 0.02 * deviation


@pytest.mark.parametrize("name", dense.ARCHITECTURES)
def test_a_step_equals_transformers(name: str) -> None:
    architecture = dense.ARCHITECTURES[name]
    oracle = dense.reference(architecture)
    tokens, as_stored = tokens_of(architecture, 33), partial(dense.as_stored, architecture)
    weights = {name: each.detach().clone() for name, each in dense.tensors_of(oracle).items()}
    model = to_model(architecture, from_hf(architecture, as_stored(weights)))
    with torch.no_grad():
        assert (model(tokens) - oracle(tokens).logits).abs().max() <= 1e-5
    losses = mean_loss(model, tokens), oracle(tokens, labels=tokens).loss
    assert_same_step(architecture, model, oracle=oracle, losses=losses, stored=as_stored)


COUNTED = [
    *dense.ARCHITECTURES.values(),
    *GPTS,
    *(llamas.ARCHITECTURES[4], llamas.WIDE_HEADS, QWEN3),
    *berts.ARCHITECTURES.values(),
    *t5s.ARCHITECTURES.values(),
    *t5s.HF_ARCHITECTURES.values(),
    *biencoders.ARCHITECTURES.values(),
    *retros.ARCHITECTURES.values(),
    retros.GROUPED,
]


@pytest.mark.parametrize("architecture", COUNTED, ids=family_of)
def test_a_model_shares_its_tensors_and_has_the_flops_that_torch_counts(
    architecture: Architecture,
) -> None:
    # torch counts scores that a mask hides, and capped scores that the backward pass repeats.
    # Values are as wide as keys when they are multiplied.
    without = {"sliding_window": 0, "attn_logit_softcapping": 0.0}
    without["v_head_dim"] = architecture.head_dim
    own = architecture.model_extra or {}
    changed = {name: value for name, value in without.items() if name in own}
    architecture = Architecture(**{**architecture.model_dump(), **changed})
    weights = random_tensors(architecture, 0)
    model = to_model(architecture, weights)
    back = named_tensors(model)
    assert all(back[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.items())
    lengths, of_sample = [32], 0
    if architecture.family == "bert":
        masked = berts.masked_samples(architecture, number=2, length=32)
        masked.padding_mask[:] = True
        loss: Callable[[Any], Tensor] = partial(berts.mean_loss, samples=masked)
        hidden = architecture.hidden_size
        of_sample = 6 * hidden * (hidden + 2) if hasattr(model, "pooler") else 0
    elif architecture.has_towers:
        texts = biencoders.pairs(architecture, number=2, length=32)
        texts.query_padding[:] = texts.block_padding[:] = False
        lengths = [32, 32]
        loss = partial(biencoders.mean_loss, texts=texts)
        width = architecture.setting("projection_dim")
        # Projections of both texts, and the scores of a query and two blocks.
        of_sample = 2 * 6 * architecture.hidden_size * width
        of_sample += 6 * 2 * (width or architecture.hidden_size)
    elif architecture.has_decoder:
        spans = t5s.span_samples(architecture, number=2, length=32, decoder_length=16)
        spans.padding_mask[:] = True
        loss, lengths = partial(t5s.mean_loss, samples=spans), [32, 16]
    else:
        loss = loss_of(architecture, 2, length=33)
        if architecture.has_neighbors:
            lengths += [2 * retros.CHUNK_LENGTH] * (
                32 // retros.CHUNK_LENGTH * retros.NUM_NEIGHBORS
            )
    # torch counts no kernels that it would not call itself: sinks would need one.
    without_sinks = patch.object(ScoreRules, "needs_scores", False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), without_sinks:
        loss(model).backward()
    memory = plugins.load("models/*/memory", architecture.family)
    of_sample += memory.flops_per_token(architecture, *lengths) * 32
    assert 2 * of_sample == counter.get_total_flops()


def test_windows_lower_flops() -> None:
    memory = plugins.load("models/*/memory", "mistral")
    plain, windowed = (
        memory.flops_per_token(dense.dense("mistral", sliding_window=w), 32) for w in (0, 7)
    )
    # Scores and values: two products, forward and twice backward, 2 operations per multiply-add.
    assert plain - windowed == 3 * (2 * 3 * 2) * (32 - 7) * 72
    assert memory.flops_per_token(dense.dense("mistral", sliding_window=40), 32) == plain


STEPS = [[20], [1] * 20, [5, 1, 1, 7, 6]]
"""Numbers of tokens that are given at once; the last ones have some and single ones."""


@pytest.mark.parametrize("steps", params(STEPS, STEPS[-1:]), ids=len)
@pytest.mark.parametrize(
    "architecture",
    [*llamas.ARCHITECTURES[::4], *GPTS, QWEN3, *dense.ARCHITECTURES.values()],
    ids=family_of,
)
def test_decoding_with_a_cache_equals_the_full_forward(
    architecture: Architecture, steps: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in random_tensors(architecture, 1).items()
    }
    model, tokens = to_model(architecture, weights), tokens_of(architecture, 20)
    with torch.no_grad():
        expected = model(tokens)
    torch.testing.assert_close(decoded(model, tokens, steps), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cuts", [[0, 1, 3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("architecture", [*GPTS, BERT], ids=family_of)
def test_stages_equal_the_whole_model(architecture: Architecture, cuts: list[int]) -> None:
    weights, model = random_tensors(architecture, 1), plugins.load("models/*/model", "gpt").Model
    x, further = tokens_of(architecture, 20), dict[str, Tensor]()
    if architecture.family == "bert":
        model = plugins.load("models/*/model", "bert").Model
        x, further = berts.inputs_of(berts.masked_samples(architecture, number=2, length=20))
    with torch.no_grad():
        whole = predictions(to_model(architecture, weights)(x, **further))
        for first, last in pairwise(cuts):
            stage = model(architecture, stage=range(first, last))
            for name, parameter in stage.named_parameters():
                tied = name == "lm_head.weight" and architecture.tie_word_embeddings
                source = "embed_tokens.weight" if tied else name
                parameter.copy_(weights[model.tensor_name(source)])
            x = stage(x, **further)
    staged = predictions(x)
    assert torch.equal(staged.logits, whole.logits)
    if whole.sample_logits is not None:
        assert staged.sample_logits is not None
        assert torch.equal(staged.sample_logits, whole.sample_logits)


SHARED = {
    "gpt": {
        "learned": gpts.LEARNED,
        "untied": gpts.gpt(tie_word_embeddings=False),
        "mqa": gpts.MQA,
        "gqa-rotary": gpts.ROTARY,
        "alibi": gpts.ALIBI,
        "plain": gpts.gpt(attention_bias=False, mlp_bias=False, position_embedding="rotary"),
    },
    **{family: dense.shared(family) for family in dense.FAMILIES},
    # An even vocabulary, so that ranks have equal parts of it.
    "qwen3": {
        "untied": qwens.qwen3(vocab_size=132),
        "mqa": qwens.qwen3(vocab_size=132, num_key_value_heads=1),
    },
    "bert": {**berts.ARCHITECTURES, "mixed": berts.MIXED},
    "biencoder": biencoders.ARCHITECTURES,
    "retro": {**retros.ARCHITECTURES, "grouped": retros.GROUPED},
    "t5": t5s.ARCHITECTURES,
    "hf_t5": t5s.HF_ARCHITECTURES,
}
FEWEST_TOKENS = {
    "bert": berts.ARCHITECTURES["bert-tanh"],
    "biencoder": biencoders.ARCHITECTURES["biencoder-plain"],
    "retro": RETRO,
    "t5": t5s.ARCHITECTURES["t5-tanh"],
    "hf_t5": t5s.HF_ARCHITECTURES["hf_t5-tied"],
}
"""Architectures with the smallest vocabulary: all of a family take the samples."""


@pytest.mark.ranks
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_tensor_parallel_ranks_equal_one_process(world_size: int, part: int) -> None:
    cases = []
    for family in [*SHARED][part::3]:
        loss: Callable[[Any], Tensor] = loss_of_tokens
        if family in FEWEST_TOKENS:
            # 17 tokens of a decoder: sequence parallelism pads them.
            length = 33 if family == "retro" else 32
            loss = loss_of(FEWEST_TOKENS[family], 3, length=length)
        cases.append((SHARED[family], loss))
    assert_tensor_parallel_equals_one_process(cases, world_size)


@pytest.mark.ranks
def test_four_tensor_parallel_ranks_equal_one_process() -> None:
    assert_tensor_parallel_equals_one_process([(SHARED["qwen3"], loss_of_tokens)], 4)
