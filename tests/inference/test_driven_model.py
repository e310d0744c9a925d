"""Messages of the first rank to the others, and scores of tokens."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.support.ranks import spawn
from tokamake.checkpoint.detect import open_any
from tokamake.inference import driven_model
from tokamake.inference.driven_model import DrivenModel, ModelCall, _packed, _unpacked
from tokamake.inference.layout import InferenceLayout, Peers
from tokamake.inference.model import InferenceModel
from tokamake.runtime.ranks import Ranks

ROWS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
RANGES = [range(1, 4), range(0), range(2)]


def test_rows_and_ranges_survive_packing() -> None:
    rows, ranges = _unpacked(_packed(ROWS, RANGES))
    assert rows == ROWS
    assert [[*each] for each in ranges] == [[*each] for each in RANGES]


def test_scores_equal_those_of_transformers(
    driven: DrivenModel, oracle: transformers.LlamaForCausalLM
) -> None:
    scores = driven.score(ROWS, RANGES)
    expected, greedy = [], []
    for row, kept in zip(ROWS, RANGES, strict=True):
        with torch.no_grad():
            logs = oracle(torch.tensor([row])).logits[0].log_softmax(-1)
        expected += [float(logs[place, row[place + 1]]) for place in kept]
        greedy += [int(logs[place].argmax()) == row[place + 1] for place in kept]
    assert scores.log_probabilities.tolist() == pytest.approx(expected, abs=1e-4)
    assert scores.are_greedy.tolist() == greedy


def test_the_likeliest_token_is_greedy(driven: DrivenModel) -> None:
    driven.new_cache(1, 10)
    token = int(driven.extend([[1, 2, 3]])[0].argmax())
    assert driven.score([[1, 2, 3, token]], [range(2, 3)]).are_greedy.tolist() == [True]


def _count_waits(folder: Path) -> int:
    """Number of messages to go on waiting while the first rank does other work."""
    driven_model._WAIT_SECONDS = 0.001
    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2)
    peers = Peers(ranks, torch.device("cpu"))
    layout = InferenceLayout(tensor_parallel_size=2)
    driven = DrivenModel(InferenceModel(open_any(folder), layout, peers=peers), 2)
    send, received, waits = driven._send, driven._received, list[int]()
    enough = threading.Event()

    def noted_send(*numbers: int) -> None:
        waits.extend(number for number in numbers[:1] if number == ModelCall.WAIT)
        if len(waits) == 20:
            enough.set()
        send(*numbers)

    def noted_received() -> list[int]:
        numbers = received()
        waits.extend(number for number in numbers[:1] if number == ModelCall.WAIT)
        return numbers

    driven._send, driven._received = noted_send, noted_received
    with driven.driven() as drives:
        if drives:
            for _ in range(20):
                driven.score(ROWS, RANGES)  # messages do not come between those of a call
            assert enough.wait(60)
    return len(waits)


@pytest.mark.ranks
def test_ranks_are_kept_waiting_while_the_first_one_does_other_work(llama: Path) -> None:
    first, second = spawn(_count_waits, 2, llama)
    assert first == second >= 20
