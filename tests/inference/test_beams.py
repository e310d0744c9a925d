"""Beam search against that of transformers."""

import pytest
import torch
import transformers

from tokamake.errors import UserError
from tokamake.inference.beams import TokenRules, search
from tokamake.inference.driven_model import DrivenModel
from tokamake.inference.sampling_settings import BeamSettings

END = 9
RULES = TokenRules(frozenset([END]))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize(("num_beams", "ends"), [(2, [END]), (4, [END]), (3, [END, 17, 40, 41])])
def test_beams_equal_those_of_transformers(
    driven: DrivenModel,
    oracle: transformers.LlamaForCausalLM,
    num_beams: int,
    ends: list[int],
    length_penalty: float,
) -> None:
    ended = 0
    for seed in range(6):
        prompt = torch.randint(100, (4 + seed,), generator=torch.Generator().manual_seed(seed))
        expected = oracle.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            max_new_tokens=12,
            length_penalty=length_penalty,
            early_stopping=False,
            eos_token_id=ends,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        beams = search(
            driven,
            prompt.tolist(),
            beams=BeamSettings(num_beams, length_penalty),
            max_new_tokens=12,
            rules=TokenRules(frozenset(ends)),
            vocab_size=100,
        )
        for row, beam in enumerate(beams):
            tokens = expected.sequences[row, len(prompt) :].tolist()
            whole = [*beam.tokens, *([] if beam.end_token is None else [beam.end_token])]
            assert whole == tokens[: len(whole)]
            assert beam.score == pytest.approx(float(expected.sequences_scores[row]), rel=1e-4)
        ended += sum(beam.end_token is not None for beam in beams)
    assert ended or length_penalty > 1  # a high exponent favours those that go on


def test_the_context_ends_beams(driven: DrivenModel) -> None:
    rules = TokenRules(frozenset([200]))
    options = {"beams": BeamSettings(2), "rules": rules, "vocab_size": 100}
    best, _ = search(driven, [1] * 46, max_new_tokens=20, **options)
    assert len(best.tokens) == 3  # the last one is never put in
    assert best.end_token is None


def test_forbidden_tokens_do_not_follow(driven: DrivenModel) -> None:
    options = {"beams": BeamSettings(3), "max_new_tokens": 6, "vocab_size": 100}
    free, *_ = search(driven, [4, 5], rules=RULES, **options)
    rules = TokenRules(frozenset([END]), {5: free.tokens[0]})
    for beam in search(driven, [4, 5], rules=rules, **options):
        assert beam.tokens[0] != free.tokens[0]


def test_a_search_that_nobody_waits_for_does_not_begin(
    driven: DrivenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driven, "extend", lambda *_, **__: pytest.fail("a pass"))
    options = {"beams": BeamSettings(2), "rules": RULES, "vocab_size": 100}
    assert search(driven, [1], max_new_tokens=3, is_wanted=lambda: False, **options) == []


def test_predictions_that_are_not_finite_are_refused(
    driven: DrivenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driven, "extend", lambda *_, **__: torch.full((1, 100), torch.nan))
    with pytest.raises(UserError, match="not finite"):
        search(
            driven,
            [1],
            beams=BeamSettings(2),
            max_new_tokens=3,
            rules=RULES,
            vocab_size=100,
        )
