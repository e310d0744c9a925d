"""Scores are those of lm-eval's own model class on the same checkpoint, for each kind of task."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.bos_tokenizers import write_bos_tokenizer
from tests.support.llamas import write_confident
from tokamake.checkpoint.convert import convert
from tokamake.errors import UserError
from tokamake.evaluate.evaluate_task import evaluate_task

pytestmark = pytest.mark.extra("oracles", "lm_eval", "accelerate", "peft")
LENGTH = 96
COMMON = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "shots": """
output_type: multiple_choice
fewshot_split: train
num_fewshot: 2
doc_to_text: "{{question}} ->"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_word": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: " {{choices[0]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 400 tokens, as a run saves it."""
    folder = tmp_path_factory.mktemp("model")
    write_confident(folder / "hf", vocab_size=400, context=LENGTH)
    convert(source=folder / "hf", target=folder / "native", format="native")
    return folder / "native"


@pytest.fixture(scope="module", params=["byte level", "SentencePiece"])
def tokenizer(
    request: pytest.FixtureRequest, sampled: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of a tokenizer: GPT-2's kind, or Llama 2's, which begins texts with BOS."""
    if request.param == "byte level":
        return sampled / "tokenizer"
    texts = sorted((sampled / "raw/docs").glob("*.jsonl"))
    return write_bos_tokenizer(texts, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def reference(model: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The exported model as lm-eval reads it itself."""
    from lm_eval.models.huggingface import HFLM

    exported = tmp_path_factory.mktemp("exported") / "hf"
    convert(source=model, target=exported, format="hf", tokenizer=tokenizer)
    own = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer)
    own.pad_token = own.eos_token
    loaded = transformers.LlamaForCausalLM.from_pretrained(exported)
    return HFLM(pretrained=loaded, tokenizer=own, batch_size=4, max_length=LENGTH)


@pytest.fixture(scope="module")
def tasks(reference: Any, sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the tasks, about real text; some answers are what the model writes."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = (sampled / "raw/docs/docs-00.jsonl").read_text().splitlines()
    texts = [text for line in lines if len((text := json.loads(line)["text"]).split()) > 50]
    rows = []
    for number, text in enumerate(texts[:24]):
        words = text.split()
        question = " ".join(words[: 5 + number])
        answer = words[5 + number : 7 + number]
        if number % 3 == 0:  # such that exact matches occur
            ids = reference.tokenizer(question, return_tensors="pt")
            out = reference.model.generate(**ids, max_new_tokens=12, do_sample=False)
            new = reference.tokenizer.decode(
                out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
            )
            answer = [new.partition("e")[0]]
        rows.append(
            {
                "question": question,
                "choices": [words[5 + number], *(words[number + 9 : number + 12])],
                "label": number % 4,
                "answer": " ".join(answer),
                "text": text[: 200 + 40 * number],
            }
        )
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, data=data) + text)
    return folder


def ours(model: Path, tokenizer: Path, output: Path, **settings: object) -> dict[str, Any]:
    evaluate_task(
        "lm_eval",
        checkpoint=model,
        tokenizer=tokenizer,
        settings=json.dumps(settings),
        batch_size=4,
        output=output,
    )
    scores: dict[str, Any] = json.loads(output.read_text())["scores"]
    return scores


def test_scores_equal_those_of_lm_evals_own_model(
    reference: Any, tasks: Path, model: Path, tokenizer: Path, tmp_path: Path
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    expected = lm_eval.simple_evaluate(
        reference,
        tasks=[*TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]
    scores = ours(model, tokenizer, tmp_path / "a.json", tasks=[*TASKS], include=str(tasks))
    compared = set()
    for task, metrics in expected.items():
        for metric, value in metrics.items():
            name = metric.removesuffix(",none")
            if isinstance(value, float) and "stderr" not in name:
                is_share = name in ("acc", "acc_norm", "exact_match")
                # The others are sums of fp32 logarithms, which depend on the order of additions.
                score = scores[f"{task}/{name}"]
                assert score == (value if is_share else pytest.approx(value, rel=1e-5)), metric
                compared.add((task, name))
    assert len(compared) == 4 + 2 + 3 + 1
    assert 0 < scores["written/exact_match"] < 1
    assert 0 < scores["choice/acc"] < 1


def test_documents_can_be_limited_and_prompts_get_the_chat_template(
    tasks: Path, model: Path, tokenizer: Path, tmp_path: Path
) -> None:
    from tests.support.served import with_template

    chat = with_template(tokenizer, tmp_path / "tokenizer")
    settings = {"tasks": ["last_word"], "include": str(tasks), "limit": 5}
    plain = ours(model, tokenizer, tmp_path / "a.json", **settings)
    whole = ours(model, tokenizer, tmp_path / "b.json", **{**settings, "limit": 0})
    assert plain != whole
    evaluate_task(
        "lm_eval",
        checkpoint=model,
        tokenizer=chat,
        settings=json.dumps({**settings, "chat": True}),
        output=tmp_path / "c.json",
    )
    assert json.loads((tmp_path / "c.json").read_text())["scores"] != plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "tasks: name at least one task of lm-eval"),
        ({"tasks": ["hellaswagg"]}, "tasks: hellaswagg: lm-eval knows no such task"),
        ({"tasks": ["a"], "include": "nowhere"}, "include: nowhere: no such folder"),
        ({"tasks": ["last_word"], "data": ["a"]}, "data: lm_eval does not use it; remove it"),
    ],
)
def test_mistakes_are_explained(
    model: Path, sampled: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ours(model, sampled / "tokenizer", tmp_path / "a.json", **settings)
