"""Filters against those of transformers; draws follow the probabilities."""

import itertools
from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokamake.inference.sampling import Chooser, biased, choose_unfiltered, distribution
from tokamake.inference.sampling_settings import Sampling

SEEN = (3, 7, 7, 11)
SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "penalty": penalty}
    for temperature, top_k, top_p, min_p, penalty in itertools.product(
        (0.5, 1.0, 1.7), (0, 5), (0.3, 1.0), (0.0, 0.2), (1.0, 1.4)
    )
]


def logits(seed: int, size: int = 40) -> torch.Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: " ".join(map(str, each.values())))
def test_filters_equal_those_of_transformers(settings: dict[str, float]) -> None:
    processors = LogitsProcessorList()
    if (penalty := settings["penalty"]) != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(TemperatureLogitsWarper(settings["temperature"]))
    if top_k := int(settings["top_k"]):
        processors.append(TopKLogitsWarper(top_k))
    processors.append(TopPLogitsWarper(settings["top_p"]))
    if min_p := settings["min_p"]:
        processors.append(MinPLogitsWarper(min_p))
    sampling = Sampling(
        settings["temperature"], top_k, settings["top_p"], min_p=min_p, repetition_penalty=penalty
    )
    for seed in range(3):
        expected = processors(torch.tensor([SEEN]), logits(seed)[None])[0].softmax(0)
        probabilities, tokens = distribution(logits(seed), sampling, seen=set(SEEN), new=Counter())
        actual = torch.zeros(40).index_copy(0, tokens, probabilities)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
        assert len({*tokens.tolist()}) == len(tokens)


def test_top_p_decays_to_its_bound() -> None:
    sampling = Sampling(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3)
    assert [sampling.top_p_of(number) for number in range(3)] == [0.8, 0.4, 0.3]
    sizes = [
        len(distribution(logits(0), sampling, seen=set(), new=Counter({1: number}))[0])
        for number in range(2)
    ]
    assert sizes[0] > sizes[1] >= 1


def test_draws_follow_the_probabilities() -> None:
    sampling = Sampling(2.0, 3, seed=0)
    chooser = Chooser(sampling, [])
    values = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
    drawn = [chooser.choose(values) for _ in range(4000)]
    expected = torch.softmax(torch.tensor([2.0, 1.5, 1.0]) / 2.0, 0)
    frequencies = torch.tensor([drawn.count(token) / len(drawn) for token in (1, 4, 2)])
    assert set(drawn) == {1, 2, 4}
    torch.testing.assert_close(frequencies, expected, atol=0.03, rtol=0)


def test_tokens_chosen_at_once_are_those_chosen_one_by_one() -> None:
    settings = [Sampling(t, 0, seed=seed) for seed, t in enumerate((1.0, 0.3, 2.0, 1e-300, 1.0))]
    rows = torch.stack([logits(seed) for seed in range(len(settings))])
    rows[4, 1:] = -torch.inf
    assert all(sampling.is_unfiltered for sampling in settings)
    together, alone = ([Chooser(sampling, []) for sampling in settings] for _ in range(2))
    drawn = [choose_unfiltered(together, rows) for _ in range(50)]
    expected = [
        [chooser.choose(row) for chooser, row in zip(alone, rows, strict=True)] for _ in range(50)
    ]
    assert drawn == expected
    assert {tokens[3] for tokens in drawn} == {int(rows[3].argmax())}
    assert {tokens[4] for tokens in drawn} == {0}
    assert len({tokens[0] for tokens in drawn}) > 1


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p_decay": 0.5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
    ],
    ids=str,
)
def test_each_filter_counts_as_one(setting: dict[str, float]) -> None:
    sampling = Sampling(**{"temperature": 1.0, "top_k": 0, **setting})
    sampling.check()
    assert not sampling.is_unfiltered


def test_a_penalty_follows_chosen_tokens_and_changes_greedy_choices() -> None:
    values = torch.tensor([1.0, 0.9, -3.0])
    chooser = Chooser(Sampling(0.0, repetition_penalty=2.0), [])
    assert [chooser.choose(values) for _ in range(3)] == [0, 1, 0]
    assert Sampling(0.0).is_plain_greedy
    assert not Sampling(0.0, repetition_penalty=2.0).is_plain_greedy


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_a_tiny_temperature_does_not_overflow(temperature: float) -> None:
    sampling = Sampling(temperature, 0)
    probabilities, tokens = distribution(logits(1), sampling, seen=set(), new=Counter())
    assert probabilities.max() == 1
    assert tokens[probabilities.argmax()] == logits(1).argmax()


def test_without_filters_a_draw_does_not_depend_on_the_order_of_logits() -> None:
    """Sums in another order can swap tokens that are about as likely; the draw stays."""
    values = torch.linspace(0, 1e-3, 40)
    swapped = values.clone()
    swapped[[3, 4]] = values[[4, 3]]
    sampling = Sampling(1.0, 0, seed=2)
    drawn = [
        [chooser.choose(each) for _ in range(200)]
        for chooser, each in ((Chooser(sampling, []), values), (Chooser(sampling, []), swapped))
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("sampling", "num_new"), [(Sampling(1.0, 0, 1e-50), 0), (Sampling(1.0, 0, 0.9, 0.5), 200)]
)
def test_a_tiny_top_p_keeps_the_most_likely_token(sampling: Sampling, num_new: int) -> None:
    probabilities, tokens = distribution(logits(1), sampling, seen=set(), new=Counter({1: num_new}))
    assert (probabilities.tolist(), tokens.tolist()) == ([1.0], [int(logits(1).argmax())])


def test_biases_equal_those_of_transformers() -> None:
    rows = torch.stack([logits(seed) for seed in range(3)])
    bias, ends = {4: 2.5, 7: -100.0}, [5, 9]
    texts = torch.tensor([SEEN] * 3)
    expected = SequenceBiasLogitsProcessor([[[t], v] for t, v in bias.items()])(texts, rows)
    short = MinNewTokensLengthLogitsProcessor(len(SEEN), 2, ends, device="cpu")
    never = dict.fromkeys(ends, -torch.inf)
    actual = biased(rows, [{**bias, **never}, {**never, **bias}, {**bias, **never}])
    torch.testing.assert_close(actual, short(texts, expected))
    assert biased(rows, [{}] * 3) is rows


def test_new_tokens_are_penalized_as_in_openais_api() -> None:
    """logit - count * frequency - (count > 0) * presence; prompts do not count."""
    sampling = Sampling(0.0, presence_penalty=0.5, frequency_penalty=0.25)
    chooser = Chooser(sampling, [0, 0, 0])
    values = torch.tensor([1.0, 0.4, -3.0])
    # 1 against 0.4, then 0.25 against 0.4, then 0.25 against -0.35, then 0 against -0.35.
    assert [chooser.choose(values) for _ in range(4)] == [0, 1, 0, 0]
    wide = Sampling(1.0, 0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    probabilities, tokens = distribution(values, wide, seen={0, 2}, new=Counter({0: 3}))
    expected = torch.tensor([0.5 - 0.5 - 0.75, 0.4, -6.0]).softmax(0)
    torch.testing.assert_close(probabilities[tokens.argsort()], expected)
