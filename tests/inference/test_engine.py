"""Sequences that continue together: each gets what it gets alone, and what transformers gives."""

from typing import Any

import pytest
import torch
import transformers

from tests.inference.conftest import CONTEXT
from tokamake.errors import UserError
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.engine import Generation, InferenceEngine
from tokamake.inference.sampling_settings import Sampling

GREEDY = Sampling(temperature=0.0)


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, (length,), generator=generator).tolist()


PROMPTS = [prompt(seed, 1 + (5 * seed) % 13) for seed in range(9)]


def engine(driven: DrivenModel, num_rows: int = 4) -> InferenceEngine:
    return InferenceEngine(driven, num_rows=num_rows, vocab_size=100)


def expected_tokens(oracle: transformers.LlamaForCausalLM, tokens: list[int], n: int) -> list[int]:
    """Greedy continuation of a prompt by transformers, alone."""
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids)
    out = oracle.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=n, pad_token_id=0
    )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("num_rows", [1, 4, 9])
def test_greedy_tokens_equal_those_of_transformers_in_any_batch(
    driven: DrivenModel, oracle: transformers.LlamaForCausalLM, num_rows: int
) -> None:
    lengths = [3 + (7 * number) % 11 for number in range(len(PROMPTS))]
    started = [
        Generation(tokens, GREEDY, length) for tokens, length in zip(PROMPTS, lengths, strict=True)
    ]
    engine(driven, num_rows).run(started)
    for each, tokens, length in zip(started, PROMPTS, lengths, strict=True):
        assert each.tokens == expected_tokens(oracle, tokens, length)
        assert each.finish == "max_new_tokens"


def test_samples_do_not_depend_on_other_sequences(driven: DrivenModel) -> None:
    def start(number: int) -> Generation:
        return Generation(PROMPTS[number], Sampling(1.0, 0, seed=number), 10)

    together, alone = [start(number) for number in range(6)], [start(number) for number in range(6)]
    engine(driven).run(together)
    for each in alone:
        engine(driven, 1).run([each])
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert len({tuple(each.tokens) for each in together}) == 6


def test_a_sequence_that_joins_later_gets_the_same_tokens(driven: DrivenModel) -> None:
    first, second = (Generation(PROMPTS[n], GREEDY, 12) for n in (2, 5))
    alone = [Generation(PROMPTS[n], GREEDY, 12) for n in (2, 5)]
    running = engine(driven)
    running.add(first)
    for _ in range(4):
        running.step()
    assert (len(first.tokens), running.num_active) == (4, 1)
    running.run([second])
    assert (running.num_active, running.num_waiting) == (0, 0)
    engine(driven).run(alone)
    assert [first.tokens, second.tokens] == [each.tokens for each in alone]


def test_new_sequences_do_not_stop_active_ones(driven: DrivenModel) -> None:
    running, long = engine(driven), Generation(PROMPTS[2], GREEDY, 20)
    running.add(long)
    for number in range(20):
        running.add(Generation(PROMPTS[number % 3], GREEDY, 1))
        running.step()
    assert len(long.tokens) == 11  # one to begin with, then one every other step


def test_scores_are_those_of_the_models_own_logits(
    driven: DrivenModel, oracle: transformers.LlamaForCausalLM
) -> None:
    sampled = Generation(
        PROMPTS[3], Sampling(1.3, 5, seed=3), 6, num_alternatives=3, scores_prompt=True
    )
    engine(driven).run([sampled, Generation(PROMPTS[4], GREEDY, 9)])
    whole = [*PROMPTS[3], *sampled.tokens]
    with torch.no_grad():
        expected = oracle(torch.tensor([whole])).logits[0].log_softmax(-1)
    scores = sampled.prompt_scores + sampled.scores
    assert len(scores) == len(whole) - 1
    for place, score in enumerate(scores):
        assert score.log_probability == pytest.approx(
            float(expected[place, whole[place + 1]]), abs=1e-4
        )
        values, tokens = expected[place].topk(3)
        assert [token for token, _ in score.alternatives] == tokens.tolist()
        assert [value for _, value in score.alternatives] == pytest.approx(
            values.tolist(), abs=1e-4
        )


def test_padding_of_the_vocabulary_is_scored_but_never_chosen(
    driven: DrivenModel, oracle: transformers.LlamaForCausalLM
) -> None:
    tokens = [token for token in prompt(4, 20) if token < 60]
    scored = Generation(tokens, GREEDY, 12, num_alternatives=60, scores_prompt=True)
    InferenceEngine(driven, num_rows=1, vocab_size=60).run([scored])
    assert max(scored.tokens) < 60
    whole = [*tokens, *scored.tokens]
    with torch.no_grad():
        logits = oracle(torch.tensor([whole])).logits[0]
    assert logits[len(tokens) - 1 :].argmax(-1).max() >= 60
    expected = logits.log_softmax(-1)
    for place, score in enumerate(scored.prompt_scores + scored.scores):
        value = float(expected[place, whole[place + 1]])
        assert score.log_probability == pytest.approx(value, abs=1e-4)
        assert max(token for token, _ in score.alternatives) < 60


def test_a_prompt_can_be_scored_without_new_tokens(driven: DrivenModel) -> None:
    scored = Generation(PROMPTS[6], GREEDY, 0, scores_prompt=True)
    engine(driven).run([scored])
    assert (scored.tokens, scored.finish) == ([], "max_new_tokens")
    assert len(scored.prompt_scores) == len(PROMPTS[6]) - 1


def test_a_long_prompt_is_scored_in_parts(
    driven: DrivenModel, oracle: transformers.LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamake.inference.engine._SCORED_TOKENS", 7)
    rows, extend = list[int](), driven.extend

    def noted_extend(*arguments: Any, **options: Any) -> torch.Tensor:
        logits = extend(*arguments, **options)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(driven, "extend", noted_extend)
    long, short = prompt(1, 30), prompt(2, 5)
    others = [Generation(short, GREEDY, 4, scores_prompt=True) for _ in range(2)]
    scored = Generation(long, GREEDY, 8, num_alternatives=1, scores_prompt=True)
    engine(driven).run([others[0], scored, others[1]])
    assert max(rows) == 7
    assert scored.tokens == expected_tokens(oracle, long, 8)
    assert others[0].tokens == others[1].tokens == expected_tokens(oracle, short, 4)
    with torch.no_grad():
        expected = oracle(torch.tensor([long])).logits[0].log_softmax(-1)
    assert [score.log_probability for score in scored.prompt_scores] == pytest.approx(
        [float(expected[place, token]) for place, token in enumerate(long[1:])], abs=1e-4
    )


@pytest.mark.parametrize("fails_at_a_beginning", [True, False])
def test_the_sequences_of_a_failed_step_are_dropped(
    driven: DrivenModel, monkeypatch: pytest.MonkeyPatch, *, fails_at_a_beginning: bool
) -> None:
    running = engine(driven)
    first, second = (Generation(PROMPTS[n], GREEDY, 6) for n in (2, 5))
    running.add(first)
    running.step()
    if fails_at_a_beginning:
        running.step()
        running.add(second)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(driven._model, "predict", lambda *_: (_ for _ in ()).throw(MemoryError))
        running.step()
    dropped, kept = (second, first) if fails_at_a_beginning else (first, second)
    assert running.drop_pass(MemoryError()) == [dropped]
    assert dropped.finish == "failed"
    running.run([] if fails_at_a_beginning else [kept])
    alone = Generation(kept.prompt, GREEDY, 6)
    engine(driven).run([alone])
    assert (kept.tokens, kept.finish) == (alone.tokens, "max_new_tokens")


def test_the_longest_sequence_gives_way_when_the_cache_cannot_grow(
    driven: DrivenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine(driven)
    short, long, cancelled = (
        Generation(tokens, GREEDY, 6) for tokens in (prompt(1, 3), prompt(2, 20), prompt(3, 4))
    )
    for each in (long, short, cancelled):
        running.add(each)
    running.step()
    running.cancel(cancelled)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(driven._model, "predict", lambda *_: (_ for _ in ()).throw(MemoryError))
        running.step()
    assert running.drop_pass(MemoryError()) == [cancelled, long]
    assert [each.finish for each in (cancelled, long, short)] == ["cancelled", "failed", None]
    running.run([])
    alone = Generation(short.prompt, GREEDY, 6)
    engine(driven).run([alone])
    assert (short.tokens, short.finish) == (alone.tokens, "max_new_tokens")


def test_sequences_end_at_end_tokens_by_the_caller_and_at_the_context(driven: DrivenModel) -> None:
    free = Generation(PROMPTS[1], GREEDY, 10)
    engine(driven).run([free])
    ended = Generation(PROMPTS[1], GREEDY, 10, end_tokens=frozenset([free.tokens[4]]))
    seen: list[int] = []

    def accept(token: int) -> bool:
        seen.append(token)
        return len(seen) < 3

    stopped = Generation(PROMPTS[1], GREEDY, 10, accept=accept)
    full = Generation(prompt(1, CONTEXT - 2), GREEDY, 10)
    engine(driven).run([ended, stopped, full])
    first = free.tokens.index(free.tokens[4])
    assert (ended.tokens, ended.finish) == (free.tokens[:first], "eod")
    assert (stopped.tokens, stopped.finish) == (free.tokens[:3], "stop")
    assert seen == free.tokens[:3]
    assert (len(full.tokens), full.finish) == (3, "context")


def test_cancelled_sequences_free_their_rows(driven: DrivenModel) -> None:
    running = engine(driven, 2)
    started = [Generation(tokens, GREEDY, 20) for tokens in PROMPTS[:4]]
    for each in started:
        running.add(each)
    running.step()
    running.step()
    assert (running.num_active, running.num_waiting) == (2, 2)
    running.cancel(started[0])
    running.cancel(started[2])  # still waits
    assert started[0] in running.step()
    assert (running.num_active, running.num_waiting) == (2, 0)
    kept = started[0].tokens[:]
    running.run([])
    assert started[0].tokens == kept
    assert [each.finish for each in started] == [
        "cancelled", "max_new_tokens", "cancelled", "max_new_tokens",
    ]  # fmt: skip
    alone = Generation(PROMPTS[3], GREEDY, 20)
    engine(driven).run([alone])
    assert started[3].tokens == alone.tokens


def test_predictions_that_are_not_finite_are_refused(
    driven: DrivenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driven, "extend", lambda *_, **__: torch.tensor([[0.0, torch.nan]]))
    with pytest.raises(UserError, match="not finite"):
        engine(driven).run([Generation([1], GREEDY, 3)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_sequence_without_finite_logits_fails_alone(
    driven: DrivenModel, request: pytest.FixtureRequest, value: float
) -> None:
    """Also its row of the cache does no harm: keys of NaN would reach a shorter sequence."""
    weight_VD = driven._model._module.embed_tokens.weight
    before = weight_VD[99].clone()
    request.addfinalizer(lambda: weight_VD[99].copy_(before))
    weight_VD[99] = value
    good = [Generation(PROMPTS[n], GREEDY, 9) for n in (2, 3, 4)]
    bad = [
        Generation([*prompt(1, 24), 99], GREEDY, 9),
        Generation([*prompt(2, 24), 99], Sampling(top_p=0.5), 9),
        Generation([*prompt(3, 9), 99, *prompt(1, 9)], GREEDY, 9, num_alternatives=2),
        Generation([99, *prompt(3, 19)], GREEDY, 9, scores_prompt=True),
    ]
    running = engine(driven)
    for each in (bad[0], good[0], *bad[1:], *good[1:]):
        running.add(each)
    while running.num_active or running.num_waiting:
        running.step()
    assert [(each.finish, each.tokens) for each in bad] == [("failed", [])] * 4
    assert all("not finite" in str(each.error) for each in bad)
    for each in good:
        alone = Generation(each.prompt, GREEDY, 9)
        engine(driven).run([alone])
        assert each.tokens == alone.tokens


def test_an_error_of_one_sequence_ends_it_alone(driven: DrivenModel) -> None:
    def fail(*_: object) -> Any:
        raise ValueError("broken")

    good, accepting, choosing = (Generation(PROMPTS[4], Sampling(top_p=0.9), 5) for _ in range(3))
    accepting.accept = fail
    choosing.chooser.choose = fail  # type: ignore[method-assign]
    running = engine(driven)
    for each in (accepting, choosing, good):
        running.add(each)
    while running.num_active or running.num_waiting:
        running.step()
    assert [each.finish for each in (accepting, choosing, good)] == [
        "failed", "failed", "max_new_tokens",
    ]  # fmt: skip
    assert choosing.tokens == []
    with pytest.raises(ValueError, match="broken"):
        engine(driven).run([Generation([1], GREEDY, 3, accept=fail)])
