"""Scores are those of lm-eval's own model class on the same checkpoint, for each kind of task."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.bos_tokenizers import write_bos_tokenizer
from tests.support.llamas import write_confident
from tests.support.served import TEMPLATE, with_template
from tokamake.checkpoint.convert import convert
from tokamake.errors import UserError
from tokamake.evaluate.evaluate_task import evaluate_task
from tokamake.evaluate.fetch_task import fetch_task

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
    expected = theirs(reference, tasks, [*TASKS])
    scores = ours(model, tokenizer, tmp_path / "a.json", tasks=[*TASKS], include=str(tasks))
    assert compared(scores, expected) == 4 + 2 + 3 + 1
    assert 0 < scores["written/exact_match"] < 1
    assert 0 < scores["choice/acc"] < 1


@pytest.mark.parametrize("chat", [False, True])
def test_examples_and_templates_are_those_of_lm_eval(
    reference: Any,
    tasks: Path,
    model: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    chat: bool,
) -> None:
    monkeypatch.setattr(reference.tokenizer, "chat_template", TEMPLATE)
    names = ["shots", "last_word", "written"]
    options = {"num_fewshot": 1, "limit": 12}
    expected = theirs(reference, tasks, names, apply_chat_template=chat, **options)
    scores = ours(
        model,
        with_template(tokenizer, tmp_path / "tokenizer"),
        tmp_path / "a.json",
        tasks=names,
        include=str(tasks),
        chat=chat,
        **options,
    )
    assert compared(scores, expected) == 2 + 2 + 1


# lm-eval takes seconds to find its 10,000 tasks.
@pytest.mark.parametrize("tokenizer", ["byte level"], indirect=True)
def test_bundled_tasks_read_data_of_the_hub_from_local_folders(
    reference: Any,
    model: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder = tmp_path / "allenai/ai2_arc"
    folder.mkdir(parents=True)
    splits = ("train", "validation", "test")
    files = [{"split": split, "path": f"{split}.jsonl"} for split in splits]
    header = json.dumps({"configs": [{"config_name": "ARC-Easy", "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{header}\n---\n")
    for split in splits:
        questions = [
            {
                "id": f"{split}-{number}",
                "question": f"Which word follows {number}?",
                "choices": {"text": ["list", "value", "a name"], "label": ["A", "B", "C"]},
                "answerKey": "ABC"[number % 3],
            }
            for number in range(9)
        ]
        lines = "".join(json.dumps(question) + "\n" for question in questions)
        (folder / f"{split}.jsonl").write_text(lines)
    fetch_task("lm_eval", settings='{"tasks": ["arc_easy"]}', output=tmp_path / "fetched.json")
    scores = ours(model, tokenizer, tmp_path / "a.json", tasks=["arc_easy"], num_fewshot=2)
    expected = theirs(reference, None, ["arc_easy"], num_fewshot=2)
    assert compared(scores, expected) == 2
    (folder / "test.jsonl").unlink()
    with pytest.raises(UserError, match=r"arc_easy: their data cannot be read .*fetch-task"):
        ours(model, tokenizer, tmp_path / "b.json", tasks=["arc_easy"])


def test_code_of_the_model_runs_only_if_allowed(
    model: Path, sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"question": "def ", "answer": "main"}\n')
    common = COMMON.format(name="unsafe", data=tmp_path / "rows.jsonl")
    task = f"{common}{TASKS['written'].replace('{{text}}', '')}unsafe_code: true\n"
    (tmp_path / "unsafe.yaml").write_text(task)
    settings = {"tasks": ["unsafe"], "include": str(tmp_path)}
    tokenizer = sampled / "tokenizer"
    with pytest.raises(UserError, match=r"tasks: unsafe: lm-eval cannot run them: .*unsafe"):
        ours(model, tokenizer, tmp_path / "a.json", **settings)
    assert "HF_ALLOW_CODE_EVAL" not in os.environ
    scores = ours(model, tokenizer, tmp_path / "b.json", allow_code=True, **settings)
    assert "unsafe/exact_match" in scores
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"


def theirs(
    reference: Any, tasks: Path | None, names: list[str], **options: Any
) -> dict[str, dict[str, Any]]:
    """Scores of lm-eval's own model."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=tasks and str(tasks), include_defaults=tasks is None)
    results = lm_eval.simple_evaluate(reference, tasks=names, task_manager=manager, **options)
    return results["results"]


def compared(scores: dict[str, Any], expected: dict[str, dict[str, Any]]) -> int:
    """Compare scores with those of lm-eval's own model; return their number."""
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
    return len(compared)


def test_documents_can_be_limited_and_prompts_get_the_chat_template(
    tasks: Path, model: Path, tokenizer: Path, tmp_path: Path
) -> None:
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
