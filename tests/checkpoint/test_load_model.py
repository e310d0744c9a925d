"""Models of all formats for inference, with the tokenizers that belong to them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.llamas import ARCHITECTURES, reference
from tests.support.runs import make_run, prepare, train_here
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import list_files, open_any
from tokamake.checkpoint.load_model import load_model, tokenizer_of, tokenizer_of_run
from tokamake.config.resolved_run import read_run, write_run
from tokamake.errors import UserError

pytestmark = pytest.mark.usefixtures("lone_rank")
TOKENS = torch.arange(1, 17)[None]


def logits(path: Path) -> torch.Tensor:
    loaded = load_model(open_any(path))
    with torch.inference_mode():
        result: torch.Tensor = loaded.model(TOKENS.to(loaded.device)).cpu()
    return result


def write_llama(folder: Path, vocab_size: int = 131) -> Path:
    architecture = ARCHITECTURES[1].model_copy(update={"vocab_size": vocab_size})
    reference(architecture).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run; do not write here."""
    config = make_run(prepare(tmp_path_factory.mktemp("root")), "trained")
    assert train_here(config) == 0
    return config.parent


def test_the_folder_of_a_run_means_its_newest_checkpoint(trained: Path, tmp_path: Path) -> None:
    newest = trained / "training/global_step6"
    assert open_any(trained).path == newest
    assert open_any(trained / "training").path == newest
    assert torch.equal(logits(trained), logits(newest))
    assert not torch.equal(logits(trained), logits(trained / "training/global_step2"))
    convert(source=trained, target=tmp_path / "hf", format="hf")
    assert torch.equal(logits(tmp_path / "hf"), logits(newest))
    assert newest / "run.yaml" in list_files(trained)


def test_a_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "training/global_step6", tmp_path / "global_step6")
    largest = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as stream:
        stream.seek(largest.stat().st_size // 2)
        stream.write(b"damaged")
    with pytest.raises(UserError, match=rf"{largest.name}: damaged"):
        logits(folder)


def with_tokenizer(trained: Path, folder: Path, tokenizer: Path | None) -> Path:
    """Copy the run into results/run below a folder, as the workflow has it."""
    copied = shutil.copytree(trained, folder / "results/run")
    path = copied / "training/global_step6/run.yaml"
    output = Path("results/run/training")
    write_run(path, read_run(path).model_copy(update={"tokenizer": tokenizer, "output": output}))
    return copied


def test_run_yaml_names_the_tokenizer(
    trained: Path, sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path counts from the folder of the workflow, which need not be the current one."""
    monkeypatch.chdir(sampled)  # without a folder `results`, which the repository may have
    run = with_tokenizer(trained, tmp_path, Path("results/tokenizer"))
    checkpoint = open_any(run)
    with pytest.raises(UserError, match=r"names the tokenizer results/tokenizer, which is missing"):
        tokenizer_of(checkpoint, None)
    shutil.copytree(sampled / "tokenizer", tmp_path / "results/tokenizer")
    message = r"global_step6: its vocabulary has \d+ entries, the tokenizer .* 400; give the"
    with pytest.raises(UserError, match=message):
        tokenizer_of(checkpoint, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer results/tokenizer 400"):
        tokenizer_of(open_any(Path("results/run")), None)


def test_without_any_tokenizer_the_option_is_named(trained: Path, tmp_path: Path) -> None:
    run = with_tokenizer(trained, tmp_path, None)
    with pytest.raises(UserError, match=r"has no tokenizer; name one with --tokenizer"):
        tokenizer_of(open_any(run), None)
    (run / "training/global_step6/run.yaml").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer; name one with --tokenizer"):
        tokenizer_of(open_any(run), None)


def test_the_run_of_a_finetuned_model_names_its_tokenizer(
    trained: Path, sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints have no run.yaml; the run's is in the folder above."""
    monkeypatch.chdir(sampled)
    folder = with_tokenizer(trained, tmp_path, None)
    (folder / "training").rename(folder / "finetuned")
    newest = folder / "finetuned/global_step6"
    (newest / "run.yaml").unlink()
    named = {"finetune": {}, "tokenizer": "results/tokenizer", "output": "results/run/training"}
    (folder / "run.yaml").write_text(yaml.safe_dump(named))
    checkpoint = open_any(folder / "finetuned")
    with pytest.raises(UserError, match=r"has no tokenizer; name one with this setting"):
        tokenizer_of(checkpoint, None, option="this setting")
    (newest / "finetune.json").write_text("{}")
    message = r"names the tokenizer results/tokenizer, which is missing; name it with --embedder-t"
    with pytest.raises(UserError, match=message):
        tokenizer_of(checkpoint, None, option="--embedder-tokenizer")
    shutil.copytree(sampled / "tokenizer", tmp_path / "results/tokenizer")
    assert tokenizer_of_run(checkpoint) == tmp_path / "results/tokenizer"


def test_the_tokenizer_beside_the_weights_counts(sampled: Path, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "hf", vocab_size=400)
    for path in (sampled / "tokenizer").iterdir():
        shutil.copy(path, folder)
    assert tokenizer_of(open_any(folder), None).vocab_size == 400
    given = tokenizer_of(open_any(folder), sampled / "tokenizer")
    assert given.fingerprint == tokenizer_of(open_any(folder), None).fingerprint


def test_an_export_of_a_run_has_its_tokenizer(trained: Path, sampled: Path, tmp_path: Path) -> None:
    run = with_tokenizer(trained, tmp_path, sampled / "tokenizer")
    write_llama(tmp_path / "hf", vocab_size=400)
    convert(source=tmp_path / "hf", target=tmp_path / "native", format="native")
    shutil.copy(run / "training/global_step6/run.yaml", open_any(tmp_path / "native").path)
    convert(source=tmp_path / "native", target=tmp_path / "export", format="hf")
    opened = tokenizer_of(open_any(tmp_path / "export"), None)
    assert opened.fingerprint == tokenizer_of(open_any(tmp_path / "native"), None).fingerprint
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["eos_token_id"] == opened.eod
