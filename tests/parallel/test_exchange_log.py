"""Logs of exchanges tell a cause from its consequences, and their hashes see each bit."""

import numpy as np
import pytest
import torch

from tokamake.parallel import exchange_log
from tokamake.parallel.exchange_log import BitOrigin, ExchangeLog, first_difference, hash_of_bits

COMPUTED, RECEIVED = BitOrigin.COMPUTED, BitOrigin.RECEIVED


def split_mix_64(data: bytes) -> int:
    """Sum of the outputs of SplitMix64 (Steele et al. 2014) for the words of padded bytes."""
    total, mask = 0, 2**64 - 1
    words = np.frombuffer(data + bytes(-len(data) % 8), np.uint64).tolist()
    for number, word in enumerate(words):
        z = (word + number * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        total += z ^ (z >> 31)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("start", [0, 1])
def test_hashes_are_of_all_bytes(
    dtype: torch.dtype, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_log, "_WORDS", 4)
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(2, 100, (61,), generator=generator).to(dtype)[start:]
    data = values.clone().view(torch.uint8).numpy().tobytes()
    assert hash_of_bits(values).item() == split_mix_64(data)


def test_each_bit_and_each_place_changes_a_hash() -> None:
    zeros = torch.zeros(3, 5)
    hashes = {hash_of_bits(zeros).item(), hash_of_bits(zeros.to(torch.int16)).item()}
    for place in range(15):
        for bit in range(32):
            changed = zeros.clone()
            word = 1 << bit if bit < 31 else -(2**31)
            changed.view(torch.int32).view(-1)[place] = word
            hashes.add(hash_of_bits(changed).item())
    assert len(hashes) == 2 + 15 * 32
    transposed = torch.arange(6.0).view(2, 3).T
    assert hash_of_bits(transposed) == hash_of_bits(transposed.contiguous())
    assert hash_of_bits(torch.zeros(0)) == 0


def test_a_log_notes_in_order_and_only_while_it_is_on() -> None:
    log, x, y = ExchangeLog(), torch.ones(2), torch.zeros(2)
    log.computed(x)
    log.is_on = True
    log.computed(x)
    log.received(y, x)
    first, second = hash_of_bits(x).item(), hash_of_bits(y).item()
    assert log.take() == [(COMPUTED, first), (RECEIVED, second), (RECEIVED, first)]
    assert log.take() == []


def test_hooks_of_gradients_end_with_a_log() -> None:
    log, x, y = ExchangeLog(), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for _ in range(2):
        log.is_on = True
        log.gradient_computed(x)
        log.gradient_received(y)
        (x * 2).sum().backward()
        (y * 3).sum().backward()
        hashes = [hash_of_bits(torch.full((2,), value)).item() for value in (2.0, 3.0)]
        assert log.take() == [(COMPUTED, hashes[0]), (RECEIVED, hashes[1])]


def test_passes_that_fail_leave_no_entries_and_no_hooks() -> None:
    log, x = ExchangeLog(), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="out of memory"), log.on():
        log.computed(x)
        log.gradient_computed(x)
        raise RuntimeError("out of memory")
    assert not log.is_on
    with log.on():
        (x * 2).sum().backward()
        assert log.take() == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([(COMPUTED, 1), (RECEIVED, 2), (COMPUTED, 3)], None),
        ([(COMPUTED, 1), (RECEIVED, 9), (COMPUTED, 9)], RECEIVED),
        ([(COMPUTED, 9), (RECEIVED, 9), (COMPUTED, 3)], COMPUTED),
        ([(COMPUTED, 1), (RECEIVED, 2)], COMPUTED),
        ([(COMPUTED, 1), (RECEIVED, 2), (COMPUTED, 3), (RECEIVED, 4)], RECEIVED),
    ],
)
def test_the_first_difference_decides(
    other: list[tuple[BitOrigin, int]], expected: BitOrigin | None
) -> None:
    assert first_difference([(COMPUTED, 1), (RECEIVED, 2), (COMPUTED, 3)], other) is expected
