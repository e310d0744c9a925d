"""All subcommands, in groups. A new stage is an entry of STAGES."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand; its function has its name, and is in a module of its name."""

    package: str
    """Package of the module, below `tokamake`."""
    example: str
    """Arguments of a call that `--help` shows."""


STAGES = {
    "Data": {
        "sample-corpus": Command(
            "data.corpus",
            """--settings '{"docs": {"num_files": 2, "file_bytes": 100000}}' --output raw""",
        ),
        "train-tokenizer": Command(
            "data.corpus", "raw/*.jsonl --vocab-size 32000 --output tokenizer"
        ),
        "extend-tokenizer": Command(
            "data.corpus", "--tokenizer bert-base-uncased --sentinels 100 --output tokenizer"
        ),
        "hash-documents": Command(
            "data.corpus", "--plan plan.json --batch web-00000 --output web-00000.rows"
        ),
        "find-duplicates": Command("data.corpus", "web-*.rows --output web.rows"),
        "sign-documents": Command(
            "data.corpus", "--plan plan.json --batch web-00000 --output web-00000.rows"
        ),
        "find-near-duplicates": Command(
            "data.corpus",
            "web-*.rows --plan plan.json --output web.rows --table web.parquet --keys web.keys",
        ),
        "hash-passages": Command(
            "data.corpus", "--plan plan.json --batch web-00000 --output web-00000.rows"
        ),
        "find-repeats": Command("data.corpus", "web-*.rows --output web.rows"),
        "fetch": Command("remote", "hf://meta-llama/Llama-3.1-8B"),
        "fetch-batch": Command(
            "data.corpus", "--plan plan.json --batch web-00000 --output fetched.json"
        ),
        "tokenize-batch": Command(
            "data.tokenize",
            "--plan plan.json --batch web-00000 --tokenizer tokenizer --output shards"
            " --summary web-00000.json",
        ),
        "merge-batch": Command(
            "data.indexed",
            "--plan plan.json --batch web-0000 --input shards --output merged"
            " --summary web-0000.json",
        ),
        "describe": Command("data.indexed", "merged/*.bin --output metadata.json"),
        "weigh": Command(
            "data.mixture", "--corpora corpora.tsv --metadata metadata.json --output weights.txt"
        ),
        "index": Command(
            "data.samples",
            "--weights weights.txt --sequence-length 4096 --train-samples 1000000"
            " --valid-samples 1000 --split 98,1,1 --seed 1234 --output index",
        ),
    },
    "Checkpoints": {
        "convert": Command(
            "checkpoint", "--from /models/llama2-7b --to mds --format mds --tensor-parallel-size 4"
        )
    },
    "Training": {
        "resolve": Command(
            "train",
            "--settings '{\"train_steps\": 100}' --run tiny --seed 1 --checkpoint native"
            " --index index --data-root data --output-folder training --output run.yaml",
        ),
        "plan-segments": Command(
            "train", "--config run.yaml --segment-steps 500 --output segments.json"
        ),
        "doctor": Command("doctor", "--profile profiles/aurora"),
        "train": Command("train", "--config results/tiny/run.yaml"),
        "prepare-finetune": Command(
            "finetune",
            '--checkpoint results/bert/training --settings \'{"task": "rte", "train_files":'
            ' "RTE/train.tsv", "validation_files": "RTE/dev.tsv"}\' --run rte --seed 1'
            " --tokenizer tokenizer --output-folder training --start start --output run.yaml",
        ),
        "finetune": Command(
            "finetune", "--config results/rte/run.yaml --output finetune.json --model finetuned"
        ),
    },
    "Model": {
        "model-card": Command(
            "report",
            "--config results/tiny/run.yaml --train results/tiny/train.json"
            " --metadata results/data/metadata.json --index results/tiny/index --output card.md",
        ),
        "fetch-task": Command("evaluate", 'lm_eval --settings \'{"tasks": ["hellaswag"]}\''),
        "push": Command("remote", "results/tiny/export hf://my-org/tiny"),
        "evaluate": Command(
            "evaluate",
            "--checkpoint results/tiny/training --data raw/test.jsonl --output evaluate.json",
        ),
        "evaluate-task": Command(
            "evaluate",
            "lambada --checkpoint results/tiny/training --data lambada.jsonl",
        ),
        "generate": Command("generate", "--checkpoint results/tiny/training --prompt 'def main'"),
        "generate-texts": Command(
            "generate", "--checkpoint results/tiny/training --num-texts 100 --output texts.jsonl"
        ),
        "score-texts": Command(
            "detoxify",
            """texts.jsonl --scorer '{"word_list": "words.txt"}' --output scored.jsonl""",
        ),
        "select-texts": Command(
            "detoxify", "scored.jsonl --keep 0.5 --output kept.jsonl --summary kept.json"
        ),
        "measure-toxicity": Command(
            "detoxify", "--before before.jsonl --after after.jsonl --output toxicity.json"
        ),
        "evaluate-finetuned": Command(
            "finetune",
            "rte --checkpoint results/rte/finetuned --data dev=RTE/dev.tsv --tokenizer tokenizer"
            " --sequence-length 128",
        ),
        "report": Command("report", "results/small results/large --output comparison.html"),
    },
    "Retrieval": {
        "embed-passages": Command(
            "retrieval", "passages.tsv --checkpoint results/ict/training --output blocks/wiki.json"
        ),
        "embed-questions": Command(
            "retrieval",
            "questions.tsv --checkpoint results/ict/training --output questions/nq.json",
        ),
        "embed-blocks": Command(
            "retrieval",
            "merged/wiki-0000_text --checkpoint results/ict/training"
            " --output blocks/wiki-0000.json",
        ),
        "index-blocks": Command(
            "retrieval", "embeddings/wiki --factory IVF1024,Flat --output wiki.json"
        ),
        "search": Command(
            "retrieval", "--queries embeddings/questions --index wiki.json --output found.json"
        ),
        "search-bm25": Command(
            "retrieval", "--questions questions.tsv --passages passages.tsv --output bm25.json"
        ),
        "evaluate-retrieval": Command(
            "retrieval",
            "found.json --questions questions.tsv --passages passages.tsv --output recall.json",
        ),
        "chunk-documents": Command(
            "retrieval", "merged/web-0000_text_document --tokenizer gpt2 --output chunks/web.json"
        ),
        "embed-chunks": Command(
            "retrieval",
            "merged/web-0000_text_document --chunks chunks/web-0000_text_document.json"
            " --checkpoint bert --tokenizer gpt2"
            " --output vectors/web-0000_text_document/0.json",
        ),
        "embed-samples": Command(
            "retrieval",
            "index --data-root . --split train --dataset web-0000_text_document"
            " --checkpoint bert --tokenizer gpt2 --output asked/train/web-0000/0.json",
        ),
        "index-chunks": Command(
            "retrieval", "index --chunks chunks --embeddings vectors --factory IVF4096,Flat"
        ),
        "find-neighbors": Command(
            "retrieval",
            "index --data-root . --split train --dataset web-0000_text_document"
            " --queries asked/train/web-0000 --nprobe 64",
        ),
    },
}
"""Subcommands that rules of the workflow call, in groups, in the order of the data's way."""

TOOLS = {
    "Workflow": {
        "new": Command("project", "my-model data/*.jsonl.zst --profile perlmutter"),
        "run": Command("run", "my.yaml train report --profile aurora train.train_steps=50"),
        "estimate": Command("workflow", "my.yaml --profile perlmutter train.train_steps=50"),
        "status": Command("status", "--json"),
    },
    "Data": {
        "plan": Command("data.corpus", "--corpora corpora.tsv --output plan.json"),
        "tokenize": Command(
            "data.tokenize", "raw/*.jsonl.zst --output out/web --tokenizer /models/llama2"
        ),
        "merge": Command("data.indexed", "out/ --output merged/web --max-bytes 5GB"),
        "try-filters": Command("report", "config/config.yaml --documents 1000 --page filters.html"),
        "show-near-duplicates": Command(
            "report", "results/data/near_duplicates/all.parquet --clusters 3"
        ),
        "split": Command("data.corpus", "raw/*.jsonl --output parts --split 98,1,1 --seed 1"),
        "verify": Command("data.tokenize", "results/data/merged/*.bin"),
        "repair": Command("data.indexed", "broken --eod 50256 --output repaired"),
        "lint-weights": Command("data.mixture", "weights.txt --train-tokens 2000000000"),
        "mix": Command("data.mixture", "0.7 a/weights.txt 0.3 b/weights.txt --output weights.txt"),
    },
    "Checkpoints": {
        "from-megatron-args": Command(
            "checkpoint",
            "--output my.yaml -- --num-layers 24 --hidden-size 1024 --num-attention-heads 16"
            " --seq-length 1024 --data-path my-gpt2_text_document --lr 1.5e-4 --train-iters 500000",
        ),
        "init-model": Command(
            "checkpoint",
            "--architecture config/models/llama2-7b.yaml --tokenizer tokenizer --seed 1"
            " --output init",
        ),
    },
    "Model": {
        "serve": Command("serve", "results/tiny/training"),
        "complete": Command("serve", "localhost:5000 --prompts prompts.txt"),
    },
    "Training": {
        "prove": Command("prove", "my.yaml"),
        "benchmark-train": Command("train.trials", "--config results/tiny/run.yaml"),
        "find-learning-rate": Command("train.trials", "--config results/tiny/run.yaml"),
    },
    "Inspection": {
        "inspect": Command("checkpoint", "results/tiny/training --tensors"),
        "trace": Command("data.indexed", "merged/web-0000_text_document 17"),
        "trace-sample": Command("train.trace", "results/tiny/run.yaml 120 3"),
        "trace-steps": Command(
            "train.trace", "results/tiny/run.yaml merged/web-0000_text_document 17"
        ),
    },
}
"""Subcommands that no rule calls."""

ONLY_RULES = {
    *("fetch-batch", "hash-documents", "find-duplicates", "sign-documents", "find-near-duplicates"),
    *("hash-passages", "find-repeats", "tokenize-batch", "merge-batch", "resolve", "plan-segments"),
    *("prepare-finetune", "model-card", "fetch-task", "evaluate-task", "evaluate-finetuned"),
    *("generate-texts", "score-texts", "select-texts", "measure-toxicity"),
}
"""Subcommands that people hardly type: `tokamake --help` leaves them out, `--help-all` does not."""

TASK_FOLDERS = {"evaluate-task": "evaluate/tasks", "evaluate-finetuned": "finetune/tasks"}
"""Subcommands that people type as `evaluate --task NAME`, with the folder of their tasks."""

GROUPS = ("Workflow", "Data", "Checkpoints", "Training", "Model", "Retrieval", "Inspection")
"""Groups in the order in which `tokamake --help` lists them."""


def commands(table: dict[str, dict[str, Command]]) -> dict[str, Command]:
    return {name: command for group in table.values() for name, command in group.items()}


COMMANDS = commands(STAGES) | commands(TOOLS)


def function_name(stage: str) -> str:
    """Name of a stage's function and rule: its subcommand with underscores."""
    return stage.replace("-", "_")


def module_name(stage: str) -> str:
    return f"tokamake.{COMMANDS[stage].package}.{function_name(stage)}"


def title(stage: str) -> str:
    """A subcommand as people type it."""
    return "evaluate --task" if stage in TASK_FOLDERS else stage


def group_of(stage: str) -> str:
    return next(group for table in (STAGES, TOOLS) for group in table if stage in table[group])


def summary(stage: str) -> str:
    """First line of a stage function's docstring, read from the source without importing it."""
    source = _source_file(module_name(stage))
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function_name(stage):
            return (ast.get_docstring(node) or "").partition("\n")[0]
    raise AssertionError(f"{source} defines no {function_name(stage)}")


def _source_file(module: str) -> Path:
    """Source of a module of this package; `find_spec` would import its parent packages."""
    package = find_spec("tokamake")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
