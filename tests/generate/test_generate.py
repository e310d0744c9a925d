"""Generation against transformers' own, and the promises of a seed."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.bos_tokenizers import write_bos_tokenizer
from tests.support.llamas import write_confident
from tokamake.checkpoint.convert import convert
from tokamake.errors import UserError
from tokamake.generate.generate import Ends, generate
from tokamake.inference.sampling_settings import BeamSettings, Sampling

PROMPTS = ("def ", "Return a", "The")
CONTEXT = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_confident(tmp_path_factory.mktemp("model"), vocab_size=400, context=CONTEXT)


def draw(model: Path, sampled: Path, output: Path, **changes: object) -> list[dict]:
    settings = {"max_new_tokens": 20, "seed": 3, **changes}

    def taken(kind: type) -> object:
        names = [field.name for field in fields(kind) if field.name in settings]
        return kind(**{name: settings.pop(name) for name in names})

    options = {"ends": taken(Ends), "sampling": taken(Sampling), "beams": taken(BeamSettings)}
    options |= {"prompts": PROMPTS, **settings}
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


def test_prompts_begin_as_those_of_transformers(model: Path, sampled: Path, tmp_path: Path) -> None:
    texts = sorted((sampled / "raw/docs").glob("*.jsonl"))
    (tmp_path / "tokenizer").mkdir()
    write_bos_tokenizer(texts, tmp_path / "tokenizer")
    samples = draw(model, tmp_path, tmp_path / "a.json", temperature=0.0)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        text, num_tokens = continue_with_transformers(model, tmp_path, prompt, 20)
        # transformers decodes new tokens alone, without the space before them.
        assert sample["text"].lstrip() == text
        assert sample["num_new_tokens"] == num_tokens


def test_only_a_checkpoint_and_a_prompt_are_needed(
    model: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = draw(model, sampled, tmp_path / "samples.json", prompts=("def ",))
    capsys.readouterr()
    whole = shutil.copytree(model, tmp_path / "model")
    shutil.copytree(sampled / "tokenizer", whole, dirs_exist_ok=True)
    generate(
        checkpoint=whole, prompts=("def ",), ends=Ends(max_new_tokens=20), sampling=Sampling(seed=3)
    )
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


def test_text_ends_before_a_stop_string(model: Path, sampled: Path, tmp_path: Path) -> None:
    (free,) = draw(model, sampled, tmp_path / "a.json", prompts=("The",), temperature=0.0)
    stop = free["text"][4:6]
    (sample,) = draw(
        model, sampled, tmp_path / "b.json", prompts=("The",), temperature=0.0, stop=("never", stop)
    )
    assert sample["text"] == free["text"][: free["text"].index(stop)]
    assert sample["stopped"] == "stop"


def test_text_ends_before_a_stop_token(model: Path, sampled: Path, tmp_path: Path) -> None:
    options = {"prompts": ("The",), "temperature": 0.0}
    (free,) = draw(model, sampled, tmp_path / "a.json", logprobs=True, **options)
    tokens = [token["id"] for token in free["tokens"]]
    (sample,) = draw(model, sampled, tmp_path / "b.json", stop_token=(tokens[5],), **options)
    assert sample["num_new_tokens"] == tokens.index(tokens[5])
    assert sample["stopped"] == "stop"
    # A stop may leave a part of a character.
    assert free["text"].startswith(sample["text"].rstrip("\N{REPLACEMENT CHARACTER}"))
    with pytest.raises(UserError, match="stop_token: 99999: not in the vocabulary; give 0 to 3"):
        draw(model, sampled, tmp_path / "c.json", stop_token=(99999,), **options)


def test_text_ends_at_each_end_token_of_the_checkpoint(
    model: Path, sampled: Path, tmp_path: Path
) -> None:
    options = {"prompts": PROMPTS, "temperature": 0.0}
    free = draw(model, sampled, tmp_path / "a.json", logprobs=True, **options)
    ends = [free[0]["tokens"][3]["id"], free[1]["tokens"][6]["id"]]
    ended = shutil.copytree(model, tmp_path / "ended")
    (ended / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    convert(source=ended, target=tmp_path / "native", format="native")
    for folder in (ended, tmp_path / "native"):
        samples = draw(folder, sampled, tmp_path / "b.json", **options)
        for number, sample in enumerate(samples):
            tokens = [token["id"] for token in free[number]["tokens"]]
            length = next((n for n, token in enumerate(tokens) if token in ends), len(tokens))
            assert sample["num_new_tokens"] == length
            assert (sample["stopped"] == "eod") == (length < 20)


def test_beams_end_at_stops(model: Path, sampled: Path, tmp_path: Path) -> None:
    options = {"prompts": ("The",), "num_beams": 3}
    (free,) = draw(model, sampled, tmp_path / "a.json", **options)
    stop = free["text"][4:7]
    (sample,) = draw(model, sampled, tmp_path / "b.json", stop=(stop,), **options)
    assert sample["text"] == free["text"].partition(stop)[0]
    assert sample["stopped"] == "stop"
    assert sample["num_new_tokens"] < free["num_new_tokens"]


def test_streamed_text_is_the_same(
    model: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = draw(model, sampled, tmp_path / "a.json")
    capsys.readouterr()
    assert draw(model, sampled, tmp_path / "b.json", stream=True) == expected
    printed = "".join(f"\n{each['prompt']}{each['text']}" for each in expected)
    assert capsys.readouterr().out == f"{printed}\n"
    # The end of each text is held back, since a stop string may begin there.
    stop = tuple(f"{each['text'][-1]}\0" for each in expected)
    assert draw(model, sampled, tmp_path / "c.json", stream=True, stop=stop) == expected
    assert capsys.readouterr().out == f"{printed}\n"


def test_log_probabilities_are_those_of_transformers(
    model: Path, sampled: Path, tmp_path: Path
) -> None:
    (sample,) = draw(model, sampled, tmp_path / "a.json", prompts=("def ",), logprobs=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(sampled / "tokenizer")
    oracle = transformers.LlamaForCausalLM.from_pretrained(model).eval()
    prompt, new = tokenizer("def ")["input_ids"], [token["id"] for token in sample["tokens"]]
    with torch.no_grad():
        scores = oracle(torch.tensor([prompt + new])).logits[0, :, :400].log_softmax(-1)
    for place, token in enumerate(sample["tokens"], len(prompt) - 1):
        assert token["log_probability"] == pytest.approx(
            float(scores[place, token["id"]]), abs=1e-4
        )
        assert token["text"] == tokenizer.decode([token["id"]])
    assert len(new) == sample["num_new_tokens"]


def test_beams_are_at_least_as_likely_as_greedy_text(
    model: Path, sampled: Path, tmp_path: Path
) -> None:
    greedy = draw(model, sampled, tmp_path / "a.json", temperature=0.0, logprobs=True)
    found = draw(model, sampled, tmp_path / "b.json", num_beams=4, length_penalty=0.0)
    for beam, sample in zip(found, greedy, strict=True):
        assert beam["stopped"] in ("eod", "max_new_tokens")
        total = sum(token["log_probability"] for token in sample["tokens"])
        assert beam["score"] >= total - 1e-3
    assert any(beam["text"] != sample["text"] for beam, sample in zip(found, greedy, strict=True))


def test_messages_of_a_chat_get_the_template(model: Path, sampled: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sampled / "tokenizer", tmp_path / "chat" / "tokenizer")
    (folder / "chat_template.jinja").write_text("[{{ messages[0].content }}] def ")
    expected = draw(model, sampled, tmp_path / "a.json", prompts=("[The] def ",), temperature=0.0)
    (sample,) = draw(
        model, folder.parent, tmp_path / "b.json", prompts=("The",), chat=True, temperature=0.0
    )
    assert (sample["prompt"], sample["text"]) == ("The", expected[0]["text"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ()}, "prompts: none"),
        ({"prompts": ("word " * 60,)}, "the model sees only 48; shorten it"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
        ({"temperature": -1.0}, "temperature: -1.0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_k": -1}, "top_k: -1"),
        ({"top_p": 0.0}, "top_p: 0.0: out of range; give more than 0, at most 1"),
        ({"top_p_bound": 1.5}, "top_p_bound: 1.5"),
        ({"min_p": 2.0}, "min_p: 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: 0.0"),
        ({"stop": ("",)}, "stop: an empty text would end everything"),
        ({"num_beams": 0}, "num_beams: 0: too small"),
        ({"batch_size": 0}, "batch_size: 0: too small"),
        ({"num_beams": 2, "stream": True}, "num_beams: 2: with stream; leave out one of them"),
        ({"num_beams": 2, "logprobs": True}, "num_beams: 2: with logprobs"),
        ({"chat": True}, "chat: the tokenizer has no chat_template"),
    ],
)
def test_mistakes_are_explained(
    model: Path, sampled: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        draw(model, sampled, tmp_path / "samples.json", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_another_vocabulary_is_refused(sampled: Path, tmp_path: Path) -> None:
    small = write_confident(tmp_path / "small", vocab_size=300, context=CONTEXT)
    with pytest.raises(UserError, match="its vocabulary has 300 entries"):
        draw(small, sampled, tmp_path / "samples.json")
