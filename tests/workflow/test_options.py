"""Settings of the config as options of commands and as params of rules."""

import json
from typing import Any

import pytest

from tests.support.workflow_configs import read_config, train, wildcards, write_runs
from tokamake.config.data import TokenizeSettings
from tokamake.config.training import ADDED_SETTINGS, TrainSettings
from tokamake.workflow.options import RunSettings, options

pytestmark = pytest.mark.usefixtures("workspace_here")


@pytest.fixture
def settings() -> RunSettings:
    """Settings of two runs: `low`, `high`."""
    runs = write_runs("run seed train.optimizer.learning_rate", "low 1 0.5", "high 2 0.75")
    return RunSettings(read_config(runs=runs))


def test_options_have_the_names_and_values_of_settings() -> None:
    section = TrainSettings(sequence_length=64, split="8,1,1")
    only = ["sequence_length", "split"]
    assert set(options(section, only=only)) == {"--sequence-length=64", "--split=8,1,1"}


def test_a_switch_is_an_option_without_value() -> None:
    assert options(TokenizeSettings(append_eod=True), only=["append_eod"]) == ["--append-eod"]
    assert options(TokenizeSettings(append_eod=False), only=["append_eod"]) == ["--no-append-eod"]


def test_settings_without_a_value_are_no_options() -> None:
    only = ["separate_last_epoch", "drop_last_partial_sequence"]
    assert options(TrainSettings(), only=only) == ["--drop-last-partial-sequence"]


def test_all_settings_but_those_left_out_are_options() -> None:
    left_out = {"deduplicate", "near_duplicates", "repeats", "filter_seconds"}
    given = options(TokenizeSettings(), leave_out=left_out)
    names = {option.strip("-").removeprefix("no-").partition("=")[0] for option in given}
    expected = set(TokenizeSettings.model_fields) - left_out
    assert names == {name.replace("_", "-") for name in expected}


def test_options_of_a_run_are_its_own(settings: RunSettings) -> None:
    function = settings.options("train", only=["sequence_length"])
    assert function(wildcards(run="low")) == ["--sequence-length=32"]


def test_a_setting_is_found_by_its_path(settings: RunSettings) -> None:
    rate = settings.value("train.optimizer.learning_rate")
    assert [rate(wildcards(run=run)) for run in ("low", "high")] == [0.5, 0.75]
    assert settings.value("seed")(wildcards(run="high")) == 2


def test_a_section_is_json_of_the_run_in_the_order_of_keys(settings: RunSettings) -> None:
    text = settings.section("train", leave_out=("segment_steps",))(wildcards(run="high"))
    section = json.loads(text)
    assert section["optimizer"]["learning_rate"] == 0.75
    expected = TrainSettings.model_fields.keys() - {"segment_steps", *ADDED_SETTINGS}
    assert section.keys() == expected
    assert list(section) == sorted(section)
    assert text == settings.section("train", leave_out=("segment_steps",))(wildcards(run="high"))


def test_a_job_of_no_run_has_the_section_that_all_runs_share(settings: RunSettings) -> None:
    section = json.loads(settings.section("sample_corpus")(wildcards()))
    assert section["docs"] == {"num_files": 2, "file_bytes": 60_000}


def test_each_prompt_and_each_stop_text_is_an_option() -> None:
    generate = {"prompts": ["The ", "it's $HOME {x}"], "stop": [" ", "\n\n"], "top_p": 0.9}
    settings = RunSettings(read_config(train=train(), generate=generate))
    options = settings.generate_options(wildcards(run="smoke"))
    assert options[:4] == ["--prompts=The ", "--prompts=it's $HOME {x}", "--stop= ", "--stop=\n\n"]
    assert {"--top-p=0.9", "--top-k=50", "--seed=1234", "--dtype=fp32"} <= {*options}


def settings_in_params(**settings: Any) -> dict[str, Any]:
    section = RunSettings(read_config(train=train(**settings))).section("train")
    value: dict[str, Any] = json.loads(section(wildcards(run="smoke")))
    return value


def test_settings_that_are_newer_than_results_change_no_params_by_default() -> None:
    assert not settings_in_params().keys() & {*ADDED_SETTINGS}
    assert settings_in_params()["save_interval"] == 1000


@pytest.mark.parametrize("value", [True, False])
def test_a_newer_setting_with_another_value_is_in_params(value: bool) -> None:
    assert settings_in_params(verify_data=value)["verify_data"] is value


@pytest.mark.parametrize(
    ("name", "value"), [("on_bad_step", {"budget": 3}), ("skip_data", [[2, 4], [9, 9]])]
)
def test_a_newer_section_or_list_is_in_params_if_it_is_set(name: str, value: Any) -> None:
    section = settings_in_params(**{name: value})[name]
    assert section == (value if isinstance(value, list) else section | value)


# How the ranks that a profile gives to jobs share models

SMOKE = wildcards(run="smoke")
PARALLEL = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def layout(tasks: Any, **changes: Any) -> list[str]:
    settings = RunSettings(read_config(train=train(**changes)))
    return settings.inference_options(SMOKE, [], resources={"tasks": tasks})


def test_ranks_share_a_model_as_in_training() -> None:
    sizes = ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]
    assert layout(8, parallel=PARALLEL, zero_stage=0) == sizes
    assert layout(8, parallel=PARALLEL, zero_stage=3) == [*sizes, "--fsdp"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_share_the_weights_unless_each_had_all_in_training(stage: int) -> None:
    """A model that its training sharded may be too large for one device, in fp32 at least."""
    assert layout(2, zero_stage=stage) == (["--fsdp"] if stage else [])


@pytest.mark.parametrize("tasks", [1, "1", "<TBD>"])
def test_one_rank_has_the_whole_model(tasks: Any) -> None:
    assert layout(tasks, parallel=PARALLEL, zero_stage=3) == []


def test_ranks_that_the_layout_does_not_fit_share_the_weights() -> None:
    assert layout(6, parallel=PARALLEL) == ["--fsdp"]


def test_evaluation_has_the_batch_size_of_the_config() -> None:
    settings = RunSettings(read_config(evaluate={"batch_size": 32}))
    alone = settings.evaluation_options(SMOKE, [], resources={"tasks": 1})
    assert alone == ["--batch-size=32"]
