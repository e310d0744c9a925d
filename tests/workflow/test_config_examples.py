"""The example configs plan their jobs, with the data and the profile that they name."""

import json
import re
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import torch
import yaml

from tests.support import pages
from tests.support.paths import ROOT
from tests.support.readings import PACK
from tests.support.sentence_data import SentenceData
from tests.support.workflows import ARCHITECTURE
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.hf import format as hf_format
from tokamake.checkpoint.init_model import init_model
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.config.architecture_files import read_architecture
from tokamake.config.runs import read_runs
from tokamake.config_files import read_table
from tokamake.preflight.run import check_ranks

EXAMPLES = sorted(path.stem for path in (ROOT / "config/examples").glob("*.yaml"))
QUICK = ("gpt3-175b", "llama-aurora")
"""Those that `make test` plans; `make test-all` plans all."""
MARKS = {"retro": [pytest.mark.extra("retrieval", "faiss")]}
PROFILE = re.compile(r"# Profile: .*profiles/(\w+)\W.*`train: (\{.*\})`")
SITES = ("aurora", "polaris")
"""Profiles whose jobs need a queue and file systems."""
TARGETS = {"gpt3-sizes": "results/gpt3-18.4b/train.json"}


TASK_FILE = re.compile(r"glue/[\w/]+\.tsv")


def write_raw(pattern: Path, keys: list[str]) -> None:
    """A raw file that a pattern names, with the keys that hold text."""
    path = pattern.with_name(pattern.name.replace("*", "part-0"))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(arrow.table({key: ["planned only"] for key in keys}), path)
        return
    line = json.dumps(dict.fromkeys(keys, "planned only")).encode() + b"\n"
    path.write_bytes(PACK.get(path.suffix[1:], bytes)(line))


@pytest.fixture
def clone(tmp_path: Path, sampled: Path, sentences: SentenceData) -> Path:
    """A clone with the tokenizers and the checkpoint that examples name."""
    clone = pages.make_clone(tmp_path)
    architecture = tmp_path / "architecture.yaml"
    architecture.write_text(yaml.safe_dump({**ARCHITECTURE, "max_position_embeddings": 4096}))
    folder, tokenizer = clone / "models/llama2-7b", sampled / "tokenizer"
    init_model(architecture=architecture, tokenizer=tokenizer, seed=1, output=folder)
    (clone / "models/gpt3-1.3b").symlink_to("llama2-7b")
    prompts = clone / "realtoxicityprompts/prompts.jsonl"
    prompts.parent.mkdir()
    prompts.write_text('{"prompt": {"text": "planned only", "toxicity": null}}\n')
    (clone / "tokenizers").mkdir()
    for name in ("gpt2", "dolma2", "qwen3"):
        (clone / "tokenizers" / name).symlink_to(tokenizer)
    (clone / "tokenizers/bert-base-uncased").symlink_to(sentences.tokenizer)
    return clone


def write_hollow(name: str, models: Path, tokenizer: Path) -> None:
    """A published model's folder with its tokenizer; its weights are a hole in a file."""
    architecture = read_architecture(ROOT / f"config/models/{name}.yaml")
    shapes = {key: tuple(size) for key, size in model_tensors.weight_shapes(architecture).items()}
    element = torch.zeros(())
    source = TensorSource([], {}, in_memory={k: element.expand(s) for k, s in shapes.items()})
    folder = models / name
    folder.mkdir()
    checkpoint = Checkpoint("hf", folder, architecture, source)
    hf_format.lay_out(folder, checkpoint, target=Target())
    for file in tokenizer.glob("tokenizer*.json"):
        (folder / file.name).symlink_to(file)


@pytest.mark.parametrize(
    "name",
    [
        each
        if each in QUICK
        else pytest.param(each, marks=[pytest.mark.grid, *MARKS.get(each, ())])
        for each in EXAMPLES
    ],
)
def test_an_example_plans_its_jobs(clone: Path, name: str, sampled: Path) -> None:
    text = (ROOT / f"config/examples/{name}.yaml").read_text()
    header = PROFILE.search(text)
    assert header
    profile, resources = header[1], yaml.safe_load(header[2])
    if "models/bert-base" in text:
        architecture, tokenizer = (ROOT / "config/models/bert-base.yaml", clone / "tokenizers")
        init_model(
            architecture=architecture,
            tokenizer=tokenizer / "bert-base-uncased",
            seed=1,
            output=clone / "models/bert-base",
        )
    for published in re.findall(r"checkpoint: models/(qwen[\w.-]+)", text):
        write_hollow(published, clone / "models", sampled / "tokenizer")
    table = read_table(clone / yaml.safe_load(text)["corpora"], setting="corpora", row="corpus")
    for row in table.rows.values():
        if not row["files"].startswith("results/"):  # a rule makes it
            write_raw(clone / row["files"], row["text_key"].split(","))
    if runs := yaml.safe_load(text).get("runs"):
        for path in TASK_FILE.findall((clone / runs).read_text()):
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            (clone / path).write_text("planned only\n")
    settings = yaml.safe_load((ROOT / f"profiles/{profile}/profile.yaml").read_text())
    settings["set-resources"]["train"] |= resources
    copy = clone / "mine/profile.yaml"
    copy.parent.mkdir()
    copy.write_text(yaml.safe_dump(settings))
    user = clone.parent / f".config/tokamake/{profile}.yaml"
    user.parent.mkdir(parents=True)
    user.write_text("account: me\n" + "queue: prod\nfilesystems: home\n" * (profile in SITES))
    target = TARGETS.get(name, "train")
    output = pages.run(
        f"snakemake --profile mine --configfile config/examples/{name}.yaml -n -- {target}",
        clone.parent,
    )
    assert all(f"{key}={value}" in output for key, value in resources.items())
    assert f"tokenize {len(table.rows)}" in " ".join(output.split())


RANKS = {
    "gpt3-1.7b": 32,
    "gpt3-3.6b": 64,
    "gpt3-7.5b": 128,
    "gpt3-18.4b": 256,
    "gpt3-39.1b": 512,
    "gpt3-76.1b": 1024,
    "gpt3-145.6b": 1536,
    "gpt3-310.1b": 1920,
}
"""GPUs of arXiv 2104.04473, table 1."""


@pytest.mark.parametrize(("name", "num_ranks"), RANKS.items())
def test_ranks_of_all_gpt3_sizes_can_share_model_and_batches(
    name: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    example = Path("config/examples/gpt3-sizes.yaml")
    runs = read_runs(yaml.safe_load(example.read_text()), str(example))
    assert runs.keys() == RANKS.keys()
    train, path = runs[name].config.train, runs[name].config.model.architecture
    check_ranks(train, num_ranks)
    architecture = read_architecture(Path(str(path)))
    train.parallel.check_architecture(architecture, train.sequence_length)


def test_each_example_is_documented() -> None:
    page = (ROOT / "config/README.md").read_text()
    assert all(f"[{name}.yaml](examples/{name}.yaml)" in page for name in EXAMPLES)
