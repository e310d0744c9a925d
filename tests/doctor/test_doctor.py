"""The command `tokamake doctor` and its exit status."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import tokenizers

from tests.support.paths import ROOT
from tests.support.programs import programs
from tokamake.doctor import encoder as doctor_encoder
from tokamake.doctor import environment
from tokamake.doctor.doctor import doctor
from tokamake.doctor.find_profile import find_profile
from tokamake.doctor.profile import read_profile


@pytest.fixture
def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the slow checks of packages and programs, which test_environment.py makes."""
    for name in ("check_torch", "check_mpi", "check_compiler", "check_snakemake"):
        monkeypatch.setattr(environment, name, lambda *_: [])


@pytest.mark.usefixtures("without_environment")
def test_a_valid_site_has_a_next_step(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(site)
    (site / "config").mkdir()
    (site / "config/config.yaml").touch()
    doctor(profile="site", output=Path("report.json"))
    printed = capsys.readouterr().out
    assert "\nok       limits for train: " in printed
    assert printed.splitlines()[-1].startswith("next: tokamake prove config/config.yaml ")
    assert json.loads((site / "report.json").read_text())["state"] != "wrong"


def test_the_command_reports_faults_and_exits_with_1(site: Path) -> None:
    (site / "mine.yaml").write_text("account: proj\nqueue: large\n")
    command = [programs("tokamake") / "tokamake", "doctor", "--profile", "site"]
    result = subprocess.run(
        [*command, "--output", "report.json"], cwd=site, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "next: " not in result.stdout
    assert (
        "wrong    limits for train: 2 nodes, 60 min in large, which requires at least 100 nodes"
        in (result.stdout)
    )
    assert result.stderr == ""
    assert json.loads((site / "report.json").read_text())["state"] == "wrong"


@pytest.mark.usefixtures("without_environment")
def test_a_missing_profile_is_one_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor(profile=f"{tmp_path}/none", directory=tmp_path)
    assert caught.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    (wrong,) = (line for line in lines if line.startswith("wrong"))
    fault = f"wrong    profile: --profile {tmp_path}/none: no profile with this name (there are "
    assert wrong.startswith(fault)


def test_the_encoder_of_a_tokenizer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_encoder, "_CHARACTERS", 1000)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eod>"}')
    model = tokenizers.models.WordLevel({"<eod>": 0, "?": 1}, "?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (found,) = doctor_encoder.check_encoder(tmp_path)
    assert (found.state, found.name) == ("warning", f"encoder of {tmp_path}")
    assert found.remedy.startswith("not the fast encoder: the model's type is 'WordLevel'; ")
    monkeypatch.undo()
    bytes_and_end = [*tokenizers.pre_tokenizers.ByteLevel.alphabet(), "<eod>"]
    vocabulary = {token: number for number, token in enumerate(bytes_and_end)}
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (found,) = doctor_encoder.check_encoder(tmp_path)
    assert found.state == "ok", found
    assert re.search(r"^tokamake .* MB/s of Python code on one thread$", found.value)
    (missing,) = doctor_encoder.check_encoder(tmp_path / "missing")
    assert missing.state == "wrong"


def test_a_profile_has_a_name_and_its_script_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = read_profile(find_profile("aurora"), tmp_path)
    assert site.launch == ROOT / "profiles/aurora/launch.sh"
    assert site.launcher.name == "mpiexec"
