"""Messages of the first rank to the others, and scores of tokens."""

import pytest
import torch
import transformers

from tokamake.inference.led_model import LedModel, _packed, _unpacked

ROWS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
RANGES = [range(1, 4), range(0), range(2)]


def test_rows_and_ranges_survive_packing() -> None:
    rows, ranges = _unpacked(_packed(ROWS, RANGES))
    assert rows == ROWS
    assert [[*each] for each in ranges] == [[*each] for each in RANGES]


def test_scores_equal_those_of_transformers(
    led: LedModel, oracle: transformers.LlamaForCausalLM
) -> None:
    scores = led.score(ROWS, RANGES)
    expected, greedy = [], []
    for row, kept in zip(ROWS, RANGES, strict=True):
        with torch.no_grad():
            logs = oracle(torch.tensor([row])).logits[0].log_softmax(-1)
        expected += [float(logs[place, row[place + 1]]) for place in kept]
        greedy += [int(logs[place].argmax()) == row[place + 1] for place in kept]
    assert scores.log_probabilities.tolist() == pytest.approx(expected, abs=1e-4)
    assert scores.are_greedy.tolist() == greedy


def test_the_likeliest_token_is_greedy(led: LedModel) -> None:
    led.new_cache(1, 10)
    token = int(led.extend([[1, 2, 3]])[0].argmax())
    assert led.score([[1, 2, 3, token]], [range(2, 3)]).are_greedy.tolist() == [True]
