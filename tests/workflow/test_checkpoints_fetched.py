"""A model and its tokenizer by address: the dry run checks them, and a job brings the weights."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.web_server import Server
from tests.support.workflows import (
    ARCHITECTURE,
    CONFIG,
    MINE,
    jobs,
    make_workspace,
    snakemake,
    snakemake_alone,
)
from tokamake import files
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.init_model import init_model
from tokamake.checkpoint.tensors.checkpoint import Target
from tokamake.status.jobs import read_jobs

HUB = Path("results/raw/hub/models/org/tiny")
ADDRESS = "hf://org/tiny"
WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def model(sampled: Path, tmp_path: Path) -> Path:
    """A model with random weights in two files, and its tokenizer, as on the Hub."""
    architecture = tmp_path / "tiny.yaml"
    architecture.write_text(yaml.safe_dump(ARCHITECTURE))
    folder, tokenizer = tmp_path / "model", sampled / "tokenizer"
    init_model(architecture=architecture, tokenizer=tokenizer, seed=1, output=tmp_path / "whole")
    whole = open_any(tmp_path / "whole")
    writer.write(folder, whole, "hf", Target(max_shard_bytes=120_000))
    return Path(shutil.copytree(tokenizer, folder, dirs_exist_ok=True))


@pytest.fixture
def home(sampled: Path, model: Path, server: Server) -> Path:
    """A workspace that trains on local files, from a model of the Hub."""
    home = make_workspace(Path.cwd())
    (home / "corpora.tsv").write_text(f"corpus\tfiles\tweight\ncode\t{sampled}/raw/code/*\t1\n")
    config = {**CONFIG, "model": {"checkpoint": ADDRESS}, "tokenizer": {"path": ADDRESS}}
    config["train"] = {**CONFIG["train"], "finetune": True}
    del config["sample_corpus"]
    (home / "my.yaml").write_text(yaml.safe_dump(config))
    server.repositories["models/org/tiny"] = {
        path.name: path.read_bytes() for path in model.iterdir()
    }
    server.large = {*WEIGHTS}
    return home


def imported(folder: Path) -> str:
    """Path of the conversion of a checkpoint."""
    return f"results/import/{folder.name}-{files.digest(os.path.normpath(folder))[:8]}"


def weights_requests(server: Server) -> list[str]:
    return [request for request in server.downloads() if any(file in request for file in WEIGHTS)]


@pytest.mark.slow
def test_a_job_brings_the_weights_of_a_model(
    home: Path, model: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = snakemake(home, "-n", *MINE, "train")
    assert "tokamake: 2 files behind addresses, " in planned.stderr
    assert (jobs(planned)["fetch_weights"], jobs(planned)["import_checkpoint"]) == (2, 1)
    assert "train_tokenizer" not in jobs(planned)
    assert weights_requests(server) == []

    target = imported(HUB / server.commit("models/org/tiny")[:12])
    server.cuts = [20_000]
    result = snakemake(home, *MINE, target)
    assert result.returncode == 0, result.stdout + result.stderr
    assert any(request.endswith("bytes=20000-") for request in weights_requests(server))
    begun = read_jobs(home)["starts"].jobs
    names = ["fetch_weights", "fetch_weights", "import_checkpoint"]
    assert [job.rule for job in begun] == names
    for file, job in zip(WEIGHTS, begun[:2], strict=True):
        assert job.outputs[0].endswith(file)
        assert (home / job.outputs[0]).is_file()
        assert f"{file}: " in (home / job.log).read_text()
    convert(source=model, target=tmp_path / "local", format="native")
    local, fetched = open_any(tmp_path / "local").source, open_any(home / target).source
    assert {*local} == {*fetched}
    assert all((local.read(key) == fetched.read(key)).all() for key in local)

    # An emptied cache asks for no weights again, and the network is only needed for what is gone.
    num_requests = len(weights_requests(server))
    shutil.rmtree(tmp_path / "cache")
    again = snakemake(home, *MINE, target)
    assert "Nothing to be done" in again.stderr
    assert "behind addresses" not in again.stderr
    assert len(weights_requests(server)) == num_requests
    server.repositories.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "Nothing to be done" in snakemake(home, *MINE, target).stderr
    shutil.rmtree(home / target)
    missing = snakemake(home, "-n", *MINE, target)
    assert jobs(missing) == {"fetch_weights": 2, "import_checkpoint": 1}
    assert f"not in {tmp_path / 'cache'}, and HF_HUB_OFFLINE is set: {ADDRESS}@" in missing.stderr


@pytest.mark.parametrize("name", ["model-$(touch X).safetensors", "model{x}.safetensors"])
def test_a_hostile_name_runs_nothing(home: Path, server: Server, name: str) -> None:
    server.repositories["models/org/tiny"][name] = b"x"
    result = snakemake(home, *MINE, "train")
    assert result.returncode == 2
    assert f"model.checkpoint: '{ADDRESS}': file name '{name}': a name has" in result.stderr
    assert "Traceback" not in result.stderr
    assert not [*home.rglob("X")]


def test_a_name_that_the_shell_would_split_is_fetched(home: Path, server: Server) -> None:
    name = "model (~a) #b.safetensors"
    server.repositories["models/org/tiny"][name] = b"x"
    path = HUB / server.commit("models/org/tiny")[:12] / name
    result = snakemake(home, *MINE, str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert (home / path).read_bytes() == b"x"
    (log,) = (home / "logs/fetch_weights").rglob("*.log")
    assert log.read_text().startswith(f"{path}: 1 bytes")


@pytest.mark.grid
@pytest.mark.slow
def test_runs_train_from_pickled_weights_in_a_subfolder(
    home: Path, model: Path, server: Server
) -> None:
    weights = torch_states(model)
    for path in model.glob("*.safetensors*"):
        path.unlink()
    torch.save(weights, model / "pytorch_model.bin")
    server.repositories["models/org/tiny"] = {
        "README.md": b"two sizes",
        **{f"small/{path.name}": path.read_bytes() for path in model.iterdir()},
    }
    server.large = {"small/pytorch_model.bin"}
    config = yaml.safe_load((home / "my.yaml").read_text())
    config |= {"model": {"checkpoint": f"{ADDRESS}/small"}}
    config |= {"tokenizer": {"path": f"{ADDRESS}/small"}}
    config["train"] |= {"train_steps": 2, "evaluation_interval": 2}
    (home / "my.yaml").write_text(yaml.safe_dump({**config, "run": "first"}))
    result = snakemake_alone(home, *MINE, "results/first/evaluate.json")
    assert result.returncode == 0, result.stdout + result.stderr
    requests = [request for request in server.downloads() if "pytorch_model.bin" in request]
    assert len(requests) == 1
    scores = json.loads((home / "results/first/evaluate.json").read_text())
    assert 0 < scores["overall"]["loss"] < 8
    (home / "my.yaml").write_text(yaml.safe_dump({**config, "run": "second"}))
    planned = jobs(snakemake(home, "-n", *MINE, "train"))
    assert planned == {"weigh": 1, "index": 1, "resolve": 1, "train": 1}


def torch_states(model: Path) -> dict[str, torch.Tensor]:
    """Weights of a model's safetensors files."""
    return {
        name: tensor
        for path in sorted(model.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_without_a_network_the_dry_run_names_the_address(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = snakemake(home, "-n", *MINE, "train")
    assert result.returncode == 2
    assert result.stderr.splitlines()[1:] == [
        f"tokamake: my.yaml: {setting}: '{ADDRESS}': HF_HUB_OFFLINE is set, so nothing can list "
        "its files; run this once on a node with a network, without HF_HUB_OFFLINE"
        for setting in ("tokenizer.path", "model.checkpoint")
    ]


def test_a_model_that_does_not_fit_is_refused_before_its_weights_come(
    home: Path, server: Server
) -> None:
    def refused(model: dict[str, str], **settings: object) -> str:
        config = yaml.safe_load((home / "my.yaml").read_text())
        config |= {"model": model, "train": {**config["train"], **settings}}
        (home / "other.yaml").write_text(yaml.safe_dump(config))
        result = snakemake(home, "-n", "--configfile", "other.yaml", "--", "train")
        assert result.returncode == 2
        return result.stderr

    architecture = yaml.safe_load((home / "architecture.yaml").read_text())
    (home / "architecture.yaml").write_text(yaml.safe_dump({**architecture, "hidden_size": 64}))
    stated = {"checkpoint": ADDRESS, "architecture": "architecture.yaml"}
    assert "hidden_size: checkpoint 32, config 64 (architecture.yaml)" in refused(stated)
    error = refused({"checkpoint": ADDRESS}, finetune=False)
    assert "has no optimizer states of adamw to continue with" in error
    assert weights_requests(server) == []
