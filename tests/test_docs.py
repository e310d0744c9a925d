"""Documentation: links resolve, references match the code, commands of all how-tos work."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
import yaml

from tests.support import pages
from tests.support.faults import KINDS
from tests.support.paths import ROOT
from tests.support.programs import torch_python
from tests.support.readings import PACK
from tests.support.shared_folders import made_once
from tests.support.web_server import Server
from tests.support.workflows import ARCHITECTURE
from tokamake.checkpoint.init_model import init_model

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("profiles/*.md"),
        *ROOT.glob("config/*.md"),
        *ROOT.glob("lib/*/*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)")
TUTORIAL = "docs/tutorial.md"
PLANNED = {
    "aurora": ("nodes=20, tasks=240", "export_hf"),
    "slurm": ("nodes=4", "tasks=16"),
    "hub": (
        "gpt2/main: hf://openai-community/gpt2, files: 2",
        "4 files behind addresses",
        "fetch",
        "tokenize",
        "first sequence: MKVLLA",
    ),
    "module": ("tokamake_train", "deploy"),
}
"""How-tos whose jobs are only planned, with parts of what their dry runs print."""
QUICKLY_PLANNED = ("aurora",)
"""Those of them that `make test` plans; `make test-all` plans all."""
EXTRAS = {
    "ict": pytest.mark.extra("retrieval", "bm25s"),
    "retrieval": pytest.mark.extra("retrieval", "bm25s", "faiss"),
    "retro": pytest.mark.extra("retrieval", "faiss"),
    "trackers": pytest.mark.extra("trackers", "wandb"),
}
"""How-tos whose commands need packages of an extra."""
BUILT = {
    "convert": ("tokamake/out/native/latest",),
    "detoxify": (
        "tokamake/results/cleaned/detoxify.json",
        "tokamake/scored.jsonl",
    ),
    "finetune": (
        "tokamake/results/order/evaluate_finetuned.json",
        "tokamake/results/order/export/config.json",
        "tokamake/scores/dev.jsonl",
    ),
    "estimate": ("tokamake/estimate.json",),
    "existing-datasets": (
        "tokamake/results/tokens/train.json",
        "tokamake/results/listed/index/index.json",
    ),
    "decontaminate": ("tokamake/results/data/clean/metadata.json",),
    "filter-documents": ("tokamake/results/data/filtered/metadata.json", "tokamake/tried.idx"),
    "move-data": ("site/tokamake/results/mine/train.json", "tokamake/all/web.idx"),
    "near-duplicates": (
        "tokamake/results/data/deduplicated/near_duplicates/all.parquet",
        "tokamake/results/data/deduplicated/metadata.json",
    ),
    "ict": (
        "tokamake/results/retriever/retrieval/recall/questions.json",
        "tokamake/results/data/retriever/report.html",
    ),
    "retrieval": ("tokamake/bm25-recall.questions.jsonl", "tokamake/found-recall.json"),
    "retro": (
        "tokamake/results/retro/evaluate.json",
        "tokamake/results/retro/neighbors/chunks.faiss",
    ),
    "repeated-text": ("tokamake/results/data/uncopied/metadata.json",),
    "experts": ("tokamake/results/experts/train.json", "tokamake/results/upcycled/train.json"),
    "phases": ("tokamake/results/long/train.json", "tokamake/results/anneal/export/config.json"),
    "recover": ("tokamake/results/branch/train.json", "tokamake/repaired.idx"),
    "notebook": ("tokamake/losses.svg",),
    "serve": ("tokamake/answers.txt",),
    "tasks": ("tokamake/results/mine/tasks/wiki.json", "tokamake/scores.json"),
    "trackers": ("tokamake/results/followed/training/trackers/trackio/demo.db",),
    "web-to-model": (
        "tokamake/results/manual/train.json",
        "tokamake/results/data/manual/report.html",
    ),
    "wikipedia": ("tokamake/results/data/wiki/metadata.json",),
    "openwebtext": (
        "tokamake/results/data/owt/metadata.json",
        "tokamake/results/raw/urls/urls.txt",
    ),
    "common-crawl": ("tokamake/results/data/crawl/metadata.json",),
    "report": ("tokamake/page.html", "tokamake/mine.html", "tokamake/snakemake-report.html"),
    "runs": ("tokamake/results/data/mine/report.html", "tokamake/comparison.html"),
}
"""How-tos that continue from the tutorial, with files that they make in the home folder."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_name_existing_files(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{name_of(page)}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{name_of(page)}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", ["docs/explanation/tour.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = {Path(name).name for name in re.findall(r"`([\w/.-]+\.(?:py|smk))`", text)}
    existing = {path.name for folder in ("lib", "workflow", "tests") for path in files_in(folder)}
    assert names <= existing | {"_x.py", "generate.py"}, names - existing


def files_in(folder: str) -> Iterator[Path]:
    yield from (ROOT / folder).rglob("*.*")


def test_the_readme_is_short_and_begins_with_a_command() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert "```sh" in lines[:25]


def test_generated_reference_pages_match_the_code(tmp_path: Path) -> None:
    copy = Path(shutil.copy(ROOT / "docs/generate.py", tmp_path))
    (tmp_path / "howto").mkdir()
    (tmp_path / "reference").mkdir()
    for page in ("howto/existing-datasets.md", "reference/optimizers.md"):
        shutil.copy(ROOT / "docs" / page, tmp_path / page)
    subprocess.run([torch_python(), copy], check=True)
    for page in tmp_path.glob("*/*.md"):
        committed = (ROOT / "docs" / page.relative_to(tmp_path)).read_text(encoding="utf-8")
        assert page.read_text(encoding="utf-8") == committed, "run: make docs"


def script_of(how_to: str) -> str:
    return pages.script(f"docs/howto/{how_to}.md")


def test_keys_beside_megatrons_arguments_are_keys_of_the_config() -> None:
    reference = (ROOT / "docs/reference/config.md").read_text()
    sections = dict(re.findall(r"^## ([\w. ]+)\n(.*?)(?=^## |\Z)", reference, re.M | re.S))
    page = (ROOT / "docs/howto/existing-datasets.md").read_text()
    rows = re.findall(r"^\| `--.*?` \| (.*) \|$", page, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`((?:\w+\.)+\w+)[:`]", row)}
    assert len(keys) > 30
    for key in sorted(keys):
        section, _, name = key.rpartition(".")
        assert f"| `{name}` |" in sections[section], key


def test_each_how_to_is_run_and_has_known_commands_only() -> None:
    names = {path.stem for path in (ROOT / "docs/howto").glob("*.md")}
    assert names == PLANNED.keys() | BUILT.keys()
    for name in names:
        assert "tokamake" in script_of(name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_on_reliability_has_a_row_for_each_fault(kind: str) -> None:
    assert f"| {kind} |" in (ROOT / "docs/explanation/reliability.md").read_text()


@pytest.fixture
def site(tmp_path: Path, sampled: Path) -> Path:
    """A home folder with a clone, and the data, tokenizer and checkpoint that how-tos name."""
    clone, folder = pages.make_clone(tmp_path), tmp_path / "site"
    # As of a workflow that has begun, for `status`.
    data = clone / "results/data"
    data.mkdir(parents=True)
    (data / "jobs.json").write_text('{"data_set": "default", "jobs": []}')
    (folder / "web").mkdir(parents=True)
    (folder / "code").mkdir()
    (folder / "web/a.jsonl.zst").write_bytes(PACK["zst"](b'{"text": "planned only"}\n'))
    code = {name: ["planned only"] for name in ("text", "content")}
    parquet.write_table(arrow.table(code), folder / "code/a.parquet")
    shutil.copytree(sampled / "tokenizer", folder / "gpt2-tokenizer")
    architecture = tmp_path / "architecture.yaml"
    architecture.write_text(yaml.safe_dump({**ARCHITECTURE, "max_position_embeddings": 4096}))
    llama = folder / "llama2-7b"
    init_model(architecture=architecture, tokenizer=sampled / "tokenizer", seed=1, output=llama)
    return tmp_path


@pytest.fixture
def hub(server: Server, sampled: Path) -> None:
    """A local server with the repositories that how-tos name."""
    server.repositories["datasets/HuggingFaceFW/fineweb-edu"] = {
        f"sample/{size}/00{number}.parquet": b"planned only"
        for size in ("10BT", "100BT")
        for number in range(3)
    }
    card = b"---\nconfigs:\n- {config_name: 20231101.en, data_files: '20231101.en/*'}\n---\n"
    server.repositories["datasets/wikimedia/wikipedia"] = {
        "README.md": card,
        "20231101.en/train-00000-of-00001.parquet": b"planned only",
    }
    server.repositories["datasets/my-org/proteins"] = {"train/0.fasta": b">a first\nMKV\nLLA\n"}
    server.repositories["models/openai-community/gpt2"] = {
        "model.safetensors": b"not fetched",
        **{path.name: path.read_bytes() for path in (sampled / "tokenizer").iterdir()},
    }


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    "how_to",
    [
        name if name in QUICKLY_PLANNED else pytest.param(name, marks=pytest.mark.grid)
        for name in PLANNED
    ],
)
def test_commands_of_a_how_to_plan_its_jobs(site: Path, how_to: str) -> None:
    files = pages.script(TUTORIAL).partition("tokamake run my.yaml")[0]
    pages.run(re.sub(r"^(tokamake|cd) .*\n", "", files, flags=re.MULTILINE), site)
    output = pages.run(script_of(how_to), site)
    assert all(part in output for part in PLANNED[how_to])


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with a clone in which the tutorial ran; do not write here."""

    def run(home: Path) -> None:
        pages.make_clone(home)
        pages.run(pages.script(TUTORIAL), home)

    return made_once(tmp_path_factory, "tutorial", run)


@pytest.mark.grid
@pytest.mark.slow
def test_commands_of_the_tutorial_work(tutorial: Path) -> None:
    results = tutorial / "tokamake/results"
    assert (results / "mine/export/model.safetensors").exists()
    assert (results / "data/mine/report.html").exists()
    assert (tutorial / "tokamake/my-model/results/my-model/train.json").exists()


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize(
    "how_to",
    [pytest.param(name, marks=[EXTRAS[name]] if name in EXTRAS else []) for name in BUILT],
)
def test_commands_of_a_how_to_work(tutorial: Path, tmp_path: Path, how_to: str) -> None:
    home = Path(shutil.copytree(tutorial, tmp_path / "home", symlinks=True))
    pages.make_clone(home / "site")
    if how_to == "move-data":  # trains on the second machine
        shutil.rmtree(home / "tokamake/results/mine/training")
        (home / "tokamake/results/mine/train.json").unlink()
    # The tutorial trains on two ranks; each rank takes seconds to start.
    alone = "--profile profiles/local --set-resources train:tasks=1"
    pages.run(script_of(how_to).replace("--profile profiles/local", alone), home)
    assert all((home / path).exists() for path in BUILT[how_to])
