"""Generation against transformers' own, and the promises of a seed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError
from tokamake.generate import decoding
from tokamake.generate.generate import generate

PROMPTS = ("def ", "Return a", "The")
CONTEXT = 48


def save_model(folder: Path, *, vocab_size: int = 400, initializer_range: float = 0.2) -> Path:
    """A random Llama whose weights are wide enough for confident, varied tokens."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def draw(model: Path, sampled: Path, output: Path, **changes: object) -> list[dict]:
    options = {"prompts": PROMPTS, "max_new_tokens": 20, "seed": 3, **changes}
    generate(checkpoint=model, tokenizer=sampled / "tokenizer", output=output, **options)
    return json.loads(output.read_text(encoding="utf-8"))


def continue_with_transformers(
    model: Path, sampled: Path, prompt: str, num_tokens: int
) -> tuple[str, int]:
    """Greedy continuation of a prompt by transformers, and its tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    oracle = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    tokens = torch.tensor([tokenizer(prompt)["input_ids"] or [tokenizer.eos_token_id]])
    token_ids = oracle.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )[0, tokens.shape[1] :].tolist()
    if token_ids[-1] == tokenizer.eos_token_id:
        token_ids.pop()
    return tokenizer.decode(token_ids), len(token_ids)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}])
def test_greedy_equals_transformers(
    model: Path, sampled: Path, tmp_path: Path, options: dict
) -> None:
    prompts = (*PROMPTS, "")
    samples = draw(model, sampled, tmp_path / "samples.json", prompts=prompts, **options)
    expected = [continue_with_transformers(model, sampled, prompt, 20) for prompt in prompts]
    assert [(sample["text"], sample["num_new_tokens"]) for sample in samples] == expected
    assert [sample["prompt"] for sample in samples] == list(prompts)
    assert len({sample["text"] for sample in samples}) == len(prompts)


def test_only_a_checkpoint_and_a_prompt_are_needed(
    model: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = draw(model, sampled, tmp_path / "samples.json", prompts=("def ",))
    capsys.readouterr()
    whole = shutil.copytree(model, tmp_path / "model")
    shutil.copytree(sampled / "tokenizer", whole, dirs_exist_ok=True)
    generate(checkpoint=whole, prompts=("def ",), max_new_tokens=20, seed=3)
    assert capsys.readouterr().out == f"def {expected[0]['text']}\n\n"


def test_the_seed_determines_the_samples(model: Path, sampled: Path, tmp_path: Path) -> None:
    draw(model, sampled, tmp_path / "a.json")
    draw(model, sampled, tmp_path / "b.json")
    other = draw(model, sampled, tmp_path / "c.json", seed=4)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    first = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert all(a["text"] != c["text"] for a, c in zip(first, other, strict=True))


def test_a_sample_does_not_depend_on_other_prompts(
    model: Path, sampled: Path, tmp_path: Path
) -> None:
    together = draw(model, sampled, tmp_path / "a.json", prompts=("The", "def ", "The"))
    alone = draw(model, sampled, tmp_path / "b.json", prompts=("def ",))
    assert together[1] == alone[0]
    assert together[0]["text"] != together[2]["text"], "a repeated prompt gets a sample of its own"


def test_generation_stops_at_the_end_of_the_context(
    model: Path, sampled: Path, tmp_path: Path
) -> None:
    (sample,) = draw(
        model, sampled, tmp_path / "a.json", prompts=("x",), max_new_tokens=500, temperature=0.0
    )
    assert sample["stopped"] == "context"
    # One token is the prompt's; the last one drawn is never put in.
    assert sample["num_new_tokens"] == CONTEXT


class Scripted:
    """Model that predicts 5, 6, 7, ... for any input, and records its inputs."""

    device = torch.device("cpu")
    architecture = type("Architecture", (), {"max_position_embeddings": 100})

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def new_cache(self) -> list:
        return []

    def next_logits(self, tokens: torch.Tensor, cache: list) -> torch.Tensor:  # noqa: ARG002
        self.seen.append(tokens[0].tolist())
        logits = torch.zeros(len(tokens), 12)
        logits[..., 4 + len(self.seen)] = 1.0
        logits[..., 11] = 2.0  # a padding row beyond the tokenizer's vocabulary
        return logits

    def agree(self, choose: Callable[[], int]) -> int:
        return choose()


def test_generation_stops_at_eod_and_feeds_only_new_tokens() -> None:
    tokenizer = Tokenizer(vocab_size=11, eod=8, encode_batch=lambda _: [], decode=str)
    script = Scripted()
    continuation = decoding.continue_tokens(
        script, [1, 2], sampling=decoding.Sampling(9, 0.0, 0), tokenizer=tokenizer, seed=0
    )
    assert continuation == ([5, 6, 7], "eod")
    assert script.seen == [[1, 2], [5], [6], [7]]


def test_samples_follow_the_softmax_of_the_top_k() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])
    generator = torch.Generator().manual_seed(0)
    sampling = decoding.Sampling(1, 2.0, 3)
    drawn = [decoding.choose(logits, sampling, generator) for _ in range(4000)]
    expected = torch.softmax(torch.tensor([2.0, 1.5, 1.0]) / 2.0, 0)
    frequencies = torch.tensor([drawn.count(token) / len(drawn) for token in (1, 4, 2)])
    assert set(drawn) == {1, 2, 4}
    torch.testing.assert_close(frequencies, expected, atol=0.03, rtol=0)


def test_predictions_that_are_not_finite_are_refused() -> None:
    sampling = decoding.Sampling(1, 1.0, 0)
    with pytest.raises(UserError, match="not finite"):
        decoding.choose(torch.tensor([0.0, torch.nan]), sampling, torch.Generator())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ()}, "prompts: none"),
        ({"prompts": ("word " * 60,)}, "the model sees only 48; shorten it"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"temperature": -1.0}, "temperature: -1.0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_k": -1}, "top_k: -1"),
    ],
)
def test_mistakes_are_explained(
    model: Path, sampled: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        draw(model, sampled, tmp_path / "samples.json", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_another_vocabulary_is_refused(sampled: Path, tmp_path: Path) -> None:
    small = save_model(tmp_path / "small", vocab_size=300)
    with pytest.raises(UserError, match="its vocabulary has 300 entries"):
        draw(small, sampled, tmp_path / "samples.json")
