"""Arguments of `tokamake run`, and the command of Snakemake that they make."""

from pathlib import Path

import pytest
from snakemake.cli import parse_config

from tests.support.paths import ROOT
from tokamake.config.root import Config
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.run.command_line import (
    DRY_RUN,
    Arguments,
    check_config,
    config_option,
    find_profile,
    parse,
    snakemake_command,
)

OVERRIDES = {
    "seed": 5,
    "run": "other",
    "train": {"train_steps": 50, "optimizer": {"learning_rate": 1e-05}, "split": "98,1,1"},
    "convert": ["hf", "mds"],
}
TYPED = [
    *("seed=5", "run=other", "train.train_steps=50", "train.optimizer.learning_rate=1.0e-5"),
    *("train.split='98,1,1'", "convert=[hf, mds]"),
]


def test_targets_settings_and_options_are_told_apart() -> None:
    arguments = ["train", "results/a=b/x.json", *TYPED, "--forcerun", "train", "seed=6"]
    expected = ["train", "results/a=b/x.json"], OVERRIDES, ["--forcerun", "train", "seed=6"]
    assert parse(arguments) == Arguments(*expected)


def test_snakemake_reads_the_settings_as_they_were_typed() -> None:
    option, *texts = config_option(OVERRIDES)
    assert option == "--config"
    # Snakemake reads numbers within a section as text, which the config turns into numbers.
    assert validate(Config, parse_config(texts), "") == validate(Config, OVERRIDES, "")
    assert config_option({}) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.=3"], "train.=3: not a setting; write SECTION.KEY=VALUE"),
        (["seed="], "seed=: not a setting"),
        (["--train.seed=3"], "--train.seed=3: settings have no minus sign; write train.seed=3"),
        (["--config=a", "seed"], None),
        (["train=3", "train.seed=3"], "train.seed=3: train has a value already"),
        (["seed=3", "seed=4"], "seed=4: given twice"),
        (["train.segment_steps=null"], "segment_steps=null: null cannot be given here"),
        (["train.split=[1"], r"train.split=\[1:1: not valid YAML"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments: list[str], message: str | None) -> None:
    if message is None:
        assert parse(arguments).options == arguments
        return
    with pytest.raises(UserError, match=message):
        parse(arguments)


def test_a_config_that_snakemake_cannot_read_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    with pytest.raises(UserError, match=r"my\.yaml: no such file; name your config file"):
        check_config(path)
    path.write_text("run: [a\n")
    with pytest.raises(UserError, match=r"my\.yaml:1: not valid YAML"):
        check_config(path)
    path.write_text("")
    with pytest.raises(UserError, match=r"my\.yaml: has no keys"):
        check_config(path)
    with pytest.raises(UserError, match=r"my\.yml: no such file; did you mean .*my\.yaml\?"):
        check_config(tmp_path / "my.yml")
    with pytest.raises(UserError, match="a folder; name the config file"):
        check_config(tmp_path)
    path.write_text("run: a\n")
    check_config(path)


def test_profiles_have_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_profile("aurora") == ROOT / "profiles/aurora"  # from the clone
    own = Path("profiles/mine")
    own.mkdir(parents=True)
    (own / "config.yaml").write_text("cores: 1\n")
    assert find_profile("mine") == find_profile("profiles/mine") == own
    with pytest.raises(UserError, match=r"--profile aurara: .*; did you mean aurora\?"):
        find_profile("aurara")
    with pytest.raises(UserError, match=r"--profile xyz: .*; there are aurora, .*mine"):
        find_profile("xyz")
    (own / "config.yaml").write_text("cores: [1\n")
    with pytest.raises(UserError, match=r"profiles/mine/config\.yaml:1: not valid YAML"):
        find_profile("mine")
    (own / "config.yaml").write_text("cores\n")
    with pytest.raises(UserError, match=r"config\.yaml: has no keys"):
        find_profile("mine")


def test_the_command_is_the_one_that_a_person_would_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = parse(["train", "report", "seed=5", "--keep-going"])
    monkeypatch.chdir(ROOT)
    command = snakemake_command(Path("my.yaml"), request, profile="local", is_dry_run=True)
    expected = "snakemake --profile profiles/local --configfile my.yaml --config seed=5 --dry-run"
    assert command == [*expected.split(), "--keep-going", "--", "train", "report"]
    monkeypatch.chdir(tmp_path)
    command = snakemake_command(Path("my.yaml"), parse([]), profile="local", is_dry_run=False)
    assert command[:3] == ["snakemake", "--snakefile", str(ROOT / "workflow/Snakefile")]
    assert command[-2:] == ["--configfile", "my.yaml"]


@pytest.mark.parametrize("spelling", DRY_RUN)
def test_a_dry_run_is_known_by_each_spelling(spelling: str) -> None:
    request = parse(["train", spelling])
    command = snakemake_command(Path("my.yaml"), request, profile="local", is_dry_run=False)
    assert not {*command}.isdisjoint(DRY_RUN)
    asked = snakemake_command(Path("my.yaml"), parse([]), profile="local", is_dry_run=True)
    assert DRY_RUN[0] in asked
