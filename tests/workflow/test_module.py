"""The workflow from another folder, and as a module of another workflow."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.snakemake_server import start
from tests.support.workflows import ARCHITECTURE, CONFIG, CORPORA, jobs

HOST = f"""
configfile: "host.yaml"

module tokamake:
    snakefile: "{ROOT}/workflow/Snakefile"
    config: config["tokamake"]

use rule * from tokamake as tokamake_*

rule deploy:
    default_target: True
    input: "results/smoke/export"
    output: "deployed.txt"
    shell: "ls {{input}} > {{output}}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder far from the repository, with a config, and a workflow that uses tokamake."""
    config = {**CONFIG, "train": {**CONFIG["train"], "train_steps": 4, "evaluation_interval": 4}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "host.yaml").write_text(yaml.safe_dump({"tokamake": config}))
    (tmp_path / "architecture.yaml").write_text(yaml.safe_dump(ARCHITECTURE))
    (tmp_path / "corpora.tsv").write_text(CORPORA)
    (tmp_path / "Snakefile").write_text(HOST)
    return tmp_path


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SNAKEMAKE_PROFILE"}
    return start(["--profile", str(ROOT / "profiles/local"), *arguments], folder, environment)


def test_from_another_folder_the_launch_script_is_found(folder: Path) -> None:
    snakefile = ("--snakefile", str(ROOT / "workflow/Snakefile"), "--configfile", "my.yaml")
    done = snakemake(folder, *snakefile, "-n", "--", "train")
    assert jobs(done)["train"] == 1
    assert f"launch={ROOT}/profiles/local/launch.sh" in done.stdout + done.stderr


def test_the_dot_test_folder_has_a_dry_run(folder: Path) -> None:
    shutil.copytree(ROOT / ".test/config", folder / "test/config")
    snakefile = ("--snakefile", str(ROOT / "workflow/Snakefile"), "--directory", "test")
    planned = jobs(snakemake(folder, *snakefile, "-n"))
    assert planned["train"] == planned["report"] == 1
    assert not (folder / "results").exists()


def test_a_module_can_rename_rules_and_target_all_runs(folder: Path) -> None:
    planned = jobs(snakemake(folder, "-n"))
    assert planned["tokamake_train"] == planned["tokamake_export_hf"] == planned["deploy"] == 1
    assert jobs(snakemake(folder, "-n", "tokamake_train"))["tokamake_train"] == 1
    done = snakemake(folder, "-n", "tokamake_trian")
    assert "did you mean tokamake_train?" in done.stderr


@pytest.mark.grid
@pytest.mark.slow
def test_a_host_workflow_builds_a_model_and_the_report(folder: Path) -> None:
    done = snakemake(folder)
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in (folder / "deployed.txt").read_text()
    assert (folder / "results/data/plan.json").exists()
    done = snakemake(folder, "tokamake_report")
    assert done.returncode == 0, done.stderr
    assert "✓ train" in (folder / "results/report.html").read_text()
    assert "Nothing to be done" in (done := snakemake(folder)).stdout + done.stderr
