"""Initial checkpoints and exports of runs: their names, files and options."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from snakemake.iocontainers import InputFiles

from tests.support.web_server import Server
from tests.support.workflow_configs import read_config, train, wildcards, write_runs
from tests.support.workflows import MINE, jobs, snakemake
from tokamake import files
from tokamake.checkpoint.native.folder import DESCRIPTION
from tokamake.workflow.checkpoints import CheckpointRules

pytestmark = pytest.mark.usefixtures("workspace_here")

SMOKE = wildcards(run="smoke")


def make_checkpoint(folder: str, *names: str) -> str:
    """Write the empty files of a checkpoint; a job of the workflow knows them by name."""
    Path(folder).mkdir(parents=True)
    for name in names or ("config.json", "model.safetensors", "tokenizer.json"):
        Path(folder, name).touch()
    return folder


def start_from(checkpoint: str, **sections: Any) -> CheckpointRules:
    """Rules of a run that takes the weights of a checkpoint."""
    Path("tokenizer").mkdir(exist_ok=True)
    Path("tokenizer/tokenizer.json").touch()
    model = {"checkpoint": checkpoint, **sections.pop("model", {})}
    tokenizer, settings = {"path": "tokenizer"}, train(finetune=True)
    config = read_config(model=model, tokenizer=tokenizer, train=settings, **sections)
    return CheckpointRules(config)


def name_of(checkpoint: str) -> str:
    return f"{Path(checkpoint).name}-{files.digest(checkpoint)[:8]}"


def test_random_weights_need_no_checkpoint() -> None:
    rules = CheckpointRules(read_config())
    assert rules.starts == {}
    assert rules.imported == rules.start_options(SMOKE) == rules.start_inputs(SMOKE) == []


def test_a_checkpoint_of_another_format_is_converted() -> None:
    path = make_checkpoint("models/llama")
    rules = start_from(path)
    name = name_of(path)
    assert rules.starts == {name: path}
    assert rules.imported == [f"results/import/{name}"]
    assert set(rules.files[name]) >= {
        f"{path}/config.json", f"{path}/model.safetensors"
    }  # fmt: skip
    assert rules.start_inputs(SMOKE) == f"results/import/{name}"
    assert rules.start_options(SMOKE) == [f"--checkpoint=results/import/{name}"]


def test_a_native_checkpoint_is_read_in_place() -> None:
    path = make_checkpoint("runs/global_step3", DESCRIPTION, ".metadata")
    rules = start_from(path)
    assert rules.imported == []
    assert rules.start_options(SMOKE) == [f"--checkpoint={path}"]
    assert set(rules.start_inputs(SMOKE)) == {f"{path}/{DESCRIPTION}", f"{path}/.metadata"}


def test_names_have_no_characters_that_paths_should_not_have() -> None:
    path = make_checkpoint("models/my llama (é)")
    (name,) = start_from(path).starts
    assert name == f"my-llama-----{files.digest(path)[:8]}"


def test_runs_that_start_from_one_checkpoint_share_its_conversion() -> None:
    path = make_checkpoint("models/llama")
    make_checkpoint("other/llama")
    runs = write_runs(
        "run model.checkpoint", f"a {path}", "b models/../models/llama/", "c other/llama"
    )
    rules = start_from(path, runs=runs)
    assert list(rules.starts) == [name_of(path), name_of("other/llama")]
    assert len(rules.imported) == 2
    folders = [rules.start_options(wildcards(run=run)) for run in "abc"]
    assert folders[0] == folders[1] != folders[2]


def test_exports_of_each_run_in_the_order_of_the_config() -> None:
    runs = write_runs("run convert", "a mds-tp2", "b [hf-bf16,universal]")
    assert CheckpointRules(read_config(runs=runs)).exported == [
        "results/a/convert/mds-tp2",
        "results/b/convert/hf-bf16",
        "results/b/convert/universal",
    ]
    assert CheckpointRules(read_config()).exported == []


def test_the_architecture_is_an_input_only_if_the_config_names_a_file() -> None:
    assert CheckpointRules(read_config()).stated_architecture(SMOKE) == [Path("architecture.yaml")]
    rules = start_from(make_checkpoint("models/llama"))
    assert rules.stated_architecture(SMOKE) == []
    rules = start_from("models/llama", model={"architecture": "architecture.yaml"})
    assert rules.stated_architecture(SMOKE) == [Path("architecture.yaml")]


TOKENIZER = SimpleNamespace(tokenizer=InputFiles(["results/tokenizer/tokenizer.json", "more.json"]))


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("hf", ["--format=hf", "--tokenizer=results/tokenizer/tokenizer.json"]),
        (
            "hf-bf16",
            ["--format=hf", "--dtype=bf16", "--tokenizer=results/tokenizer/tokenizer.json"],
        ),
        ("mds-tp2", ["--format=mds", "--tensor-parallel-size=2"]),
        (
            "mds-pipeline-tp2-pp4-fp16",
            [
                *("--format=mds-pipeline", "--tensor-parallel-size=2"),
                *("--pipeline-parallel-size=4", "--dtype=fp16"),
            ],
        ),
    ],
)
def test_the_name_of_a_format_states_the_options_of_convert(form: str, options: list[str]) -> None:
    rules = CheckpointRules(read_config())
    assert rules.export_options(wildcards(run="smoke", form=form), TOKENIZER) == options


def test_an_unknown_format_ends_the_workflow_with_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rules = CheckpointRules(read_config())
    with pytest.raises(SystemExit, match="2"):
        rules.export_options(wildcards(run="smoke", form="mds-zz2"), TOKENIZER)
    expected = "tokamake: results/smoke/convert/mds-zz2: give a format ("
    assert capsys.readouterr().err.startswith(expected)
    with pytest.raises(SystemExit, match="2"):
        rules.export_options(wildcards(run="smoke", form="hf-tp2"), TOKENIZER)
    assert capsys.readouterr().err == (
        "tokamake: results/smoke/convert/hf-tp2: format hf has no tensor_parallel_size; "
        "leave it out\n"
    )


def test_an_export_keeps_the_generation_config_of_its_first_checkpoint() -> None:
    assert start_from(make_checkpoint("plain")).generation_options(SMOKE, []) == []
    names = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
    rules = start_from(make_checkpoint("models/llama", *names))
    assert rules.generation_options(SMOKE, []) == ["--generation-config=models/llama"]
    assert CheckpointRules(read_config()).generation_options(SMOKE, []) == []


def test_a_model_card_names_files_the_base_model_and_the_licence() -> None:
    folder = "results/raw/hub/models/org/gpt/0123456789ab"
    rules = start_from(make_checkpoint(folder), export={"license": "mit"})
    assert rules.card_options(SMOKE) == [
        "--files=code=results/raw/code/*",
        "--files=docs=results/raw/docs/*",
        "--base-model=org/gpt",
        "--license=mit",
    ]
    assert CheckpointRules(read_config()).card_options(SMOKE) == [
        "--files=code=results/raw/code/*",
        "--files=docs=results/raw/docs/*",
    ]


@pytest.mark.grid
def test_an_export_is_uploaded_once(
    built: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    home = Path(shutil.copytree(built, Path.cwd() / "pushed", symlinks=True))
    config = yaml.safe_load((home / "my.yaml").read_text())
    config["export"] = {"push": "hf://org/gpt"}
    (home / "my.yaml").write_text(yaml.safe_dump(config))
    assert jobs(snakemake(home, "-n", *MINE, "all"))["push"] == 1
    result = snakemake(home, *MINE, "all")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "logits: equal to the source" in (home / "logs/smoke/export_hf.log").read_text()
    export = home / "results/smoke/export"
    assert {"README.md", "config.json", "tokenizer.json"} <= {
        path.name for path in export.iterdir()
    }
    uploaded = server.repositories["models/org/gpt"]
    assert uploaded == {
        path.name: path.read_bytes() for path in export.iterdir() if path.name[0] != "."
    }
    assert "Nothing to be done" in snakemake(home, *MINE, "all").stderr
