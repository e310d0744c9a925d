"""Settings of sampling and of beam search; `sampling` and `beams` apply them."""

import hashlib
from dataclasses import dataclass
from math import inf

from cyclopts import Parameter

from tokamake.errors import UserError


@Parameter(name="*")
@dataclass(frozen=True)
class Sampling:
    """Settings of the choice of the next token."""

    temperature: float = 0.8
    """Softmax temperature; 0 always takes the most likely token."""
    top_k: int = 50
    """Number of most likely tokens to sample from; 0 for all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_p_decay: float = 1.0
    """Factor of `top_p` after each token, as in Megatron."""
    top_p_bound: float = 0.0
    """Lower bound of `top_p` as it decays."""
    min_p: float = 0.0
    """Sample from tokens that are at least this times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens that occurred before."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of new tokens that occurred before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of new tokens as often as they occurred before."""
    seed: int = 1234
    """Seed of the draws."""

    def check(self) -> None:
        """Check the ranges of all values."""
        for name, is_right, remedy in (
            ("temperature", 0 <= self.temperature < inf, "give 0 or more"),
            ("top_k", self.top_k >= 0, "give 0 for all, or more"),
            ("top_p", 0 < self.top_p <= 1, "give more than 0, at most 1"),
            ("top_p_decay", 0 < self.top_p_decay <= 1, "give more than 0, at most 1"),
            ("top_p_bound", 0 <= self.top_p_bound <= self.top_p, "give 0 to top_p"),
            ("min_p", 0 <= self.min_p <= 1, "give 0 to 1"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "give 0.01 to 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "give -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "give -2 to 2"),
        ):
            if not is_right:
                raise UserError(f"{name}: {getattr(self, name)}: out of range; {remedy}")

    @property
    def has_penalty(self) -> bool:
        """Whether earlier tokens change the logits."""
        has_differences = self.presence_penalty != 0 or self.frequency_penalty != 0
        return has_differences or self.repetition_penalty != 1

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the maximum of the logits."""
        return self.temperature == 0 and not self.has_penalty

    @property
    def is_unfiltered(self) -> bool:
        """Whether each token of the vocabulary can be drawn, with its own probability."""
        return (
            self.temperature > 0
            and self.top_k == self.min_p == 0
            and self.top_p == self.top_p_decay == 1
            and not self.has_penalty
        )

    def top_p_of(self, num_new: int) -> float:
        """`top_p` of the token after `num_new` new tokens."""
        return max(self.top_p * self.top_p_decay**num_new, self.top_p_bound)


@Parameter(name="*")
@dataclass(frozen=True)
class BeamSettings:
    """Beam search."""

    num_beams: int = 1
    """Continuations to keep at each token; the best one at the end is the result, and no setting of
    sampling has an effect. 1: sampling."""
    length_penalty: float = 1.0
    """Exponent of the length by which beams' log-probabilities are divided."""


def prompt_seed(seed: int, prompt: str, *, repetition: int) -> int:
    """A different seed for each prompt, and for each repetition of a prompt."""
    digest = hashlib.sha256(f"{seed} {repetition} {prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
