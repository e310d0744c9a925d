"""`tokamake prove` starts ranks, says what it has proved, and fails if a gradient is wrong."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support import proved_compositions
from tests.support.compositions import Composition
from tests.support.layouts import parallel
from tests.support.planted_faults import plant
from tests.support.proved_compositions import assert_proved, prove_all
from tests.support.runs import make_run, prepare
from tests.support.wrong_factors import FAULTS
from tokamake.cli import make_app
from tokamake.errors import UserError
from tokamake.parallel import collectives
from tokamake.prove import local_ranks
from tokamake.prove.prove import prove
from tokamake.runtime.ranks import Ranks

pytestmark = pytest.mark.ranks

FAULT = "copied_gradient_not_added"
CONFIG = """\
run: planned
model: {architecture: config/models/tiny-gpt.yaml}
train:
  precision: bf16
  global_batch_size: 16
  parallel: {tensor_parallel_size: 2, pipeline_parallel_size: 4}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run.yaml with tensor parallelism."""
    root = prepare(tmp_path_factory.mktemp("prove"))
    return make_run(root, "wide", backend="native", **parallel(tp=2))


def test_a_layout_is_proved(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prove(config=config)
    assert capfd.readouterr().out.splitlines() == [
        "proving: wide: 4 ranks, in fp32",
        "proved: wide: tensor 2 × context 1 × pipeline 1 × data 2 = 4 ranks, native, ZeRO 1: the "
        "same losses, gradients and weights as in one process, in fp32",
    ]


@contextmanager
def planted_here() -> Iterator[None]:
    """Plant a fault in this process, and in those that it forks."""
    code = collectives.copy.__code__
    plant(FAULTS[FAULT])
    try:
        yield
    finally:
        collectives.copy.__code__ = code


def test_a_wrong_gradient_fails_and_is_named(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with planted_here(), pytest.raises(SystemExit, match="1"):
        prove(config=config)
    out = capfd.readouterr().out
    assert "\nNOT proved: wide: tensor 2" in out
    assert re.search(r"fp32: gradient norm of step 1: \S+, expected \S+ \(\S+ times\)", out)
    assert re.search(r"gradients of step 1: model.*weight: differs by \S+ of its norm", out)
    sizes = [float(size) for size in re.findall(r"differs by (\S+) of its norm", out)]
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)
    assert out.endswith("Report these lines with the config, and use another layout until then.\n")


def prove_all_wrongly(compositions: list[Composition]) -> list[list[str]]:
    plant(FAULTS[FAULT])
    return prove_all(compositions)


def test_a_wrong_factor_is_shown_in_its_smallest_form_with_a_config_that_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needless = {"optimizer.name": "sgd", "dropout.hidden": 0.1}
    drawn = Composition("llama", "causal", needless | {"parallel.tensor_parallel_size": 2}, 3)
    monkeypatch.setattr(proved_compositions, "prove_all", prove_all_wrongly)
    with pytest.raises(pytest.fail.Exception) as failed:
        assert_proved([drawn])
    text, _, config = str(failed.value).partition("\nrun.yaml for `tokamake prove`:\n")
    begin = "failed: 1; the smallest form of one:\n"
    shown, line = text.removeprefix(begin).rstrip("\n").rsplit("\n", 1)
    assert yaml.safe_load(shown) == {
        "family": "llama",
        "objective": "causal",
        "parallel.tensor_parallel_size": 2,
        "seed": 3,
    }
    (tmp_path / "run.yaml").write_text(config)
    capfd.readouterr()
    with planted_here(), pytest.raises(SystemExit, match="1"):
        prove(config=tmp_path / "run.yaml")
    assert line.partition(", expected")[0].split(": ")[0] in capfd.readouterr().out


def test_a_config_is_proved_before_its_data_exist(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    planned = tmp_path / "config.yaml"
    planned.write_text(CONFIG)
    prove(config=planned, most_ranks=8)
    first, second, third, *rest = capfd.readouterr().out.splitlines()
    assert first == "planned: a pipeline of 2 ranks, not 4, to start at most 8 ranks here"
    assert second == "proving: planned: 8 ranks, in fp32 and then in bf16"
    assert third.startswith("proved: planned: tensor 2 × context 1 × pipeline 2 × data 2 = 8 ranks")
    assert third.endswith(" in one process, in fp32 and bf16")
    assert rest[:2] == [
        "planned: now its pipeline of 4 ranks and data parallelism alone",
        "proving: planned: 8 ranks, in fp32",
    ]
    (last,) = rest[2:]
    assert last.startswith("proved: planned: tensor 1 × context 1 × pipeline 4 × data 2 = 8 ranks")
    assert last.endswith(" in one process, in fp32")


def test_a_wrong_pipeline_fails_and_a_longer_one_is_said_to_be_unproved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = tmp_path / "config.yaml"
    planned.write_text(CONFIG)
    results = iter([[], ["fp32: loss of step 1: 2, expected 1"]])
    monkeypatch.setattr(local_ranks, "on_local_ranks", lambda *_: next(results))
    with pytest.raises(SystemExit, match="1"):
        prove(config=planned, most_ranks=8)
    assert "\nNOT proved: planned: tensor 1" in capfd.readouterr().out
    planned.write_text(CONFIG.replace("tensor_parallel_size: 2, ", ""))
    results = iter([[]])
    with pytest.raises(SystemExit, match="3"):
        prove(config=planned, most_ranks=4)
    assert capfd.readouterr().out.splitlines()[-1] == (
        "planned: its pipeline of 4 ranks needs 8 ranks alone, and is not proved; raise "
        "--most-ranks"
    )


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    planned = tmp_path / "config.yaml"
    planned.write_text(CONFIG)
    with pytest.raises(UserError, match=r"run planned: .* 8 ranks, and 4 may run on this machine"):
        prove(config=planned, most_ranks=4)
    with pytest.raises(UserError, match="--most-ranks 1: give 2 or more"):
        prove(config=planned, most_ranks=1)


def test_no_run_of_a_table_is_proved_if_one_needs_more_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "runs.tsv"
    table.write_text("run\ttrain.parallel.tensor_parallel_size\nsmall\t1\nlarge\t4\n")
    planned = tmp_path / "config.yaml"
    planned.write_text(CONFIG.replace("run: planned", f"runs: {table}"))
    with pytest.raises(UserError, match=r"run large: .* needs 16 ranks, and 8 may run"):
        prove(config=planned, most_ranks=8)
    assert not capfd.readouterr().out


def test_settings_of_the_command_line_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = tmp_path / "config.yaml"
    planned.write_text(CONFIG)
    monkeypatch.setattr(local_ranks, "on_local_ranks", lambda *_: [])
    prove(planned, "train.parallel={pipeline_parallel_size: 1}", "train.precision=fp32")
    assert capfd.readouterr().out.startswith("proving: planned: 4 ranks, in fp32\n")


def test_a_launcher_decides_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = tmp_path / "config.yaml"
    planned.write_text(CONFIG)
    monkeypatch.setattr(Ranks, "find", lambda: Ranks(0, 8, 0, 8))
    with pytest.raises(UserError, match="--most-ranks 4: a launcher has started 8 ranks"):
        prove(planned, most_ranks=4)


@pytest.mark.parametrize("words", [["my.yaml"], ["--config", "my.yaml"]])
def test_the_config_needs_no_option(words: list[str]) -> None:
    _, bound, _ = make_app("prove").parse_args(["prove", *words], exit_on_error=False)
    assert bound.arguments == {"config": Path("my.yaml")}
