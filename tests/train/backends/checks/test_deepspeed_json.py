"""Settings of DeepSpeed's JSON file pass to it, or the config is refused with the reason."""

import re
from collections.abc import Collection
from typing import Any

import pytest

from tests.support.deepspeed_runs import BF16, zero
from tests.support.layouts import Layout, train_all
from tests.support.proofs import SHALLOW, check, make_runs, make_start
from tests.support.ranks import spawn
from tests.support.runs import losses, make_run, prepare, train_here
from tokamake.config.resolved_run import read_run
from tokamake.config.training import TrainSettings
from tokamake.train.backends import _deepspeed_setup as setup
from tokamake.train.backends.checks._deepspeed_json import OF_BUCKETS, OWN, PASSED, REFUSED

KNOWN = {*PASSED, *OWN, *REFUSED}
ZERO = "zero_optimization"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 8}, "train_batch_size: remove it, and set train.global_batch_size"),
        ({ZERO: {"stage": 3}}, "zero_optimization.stage: remove it, and set train.zero_stage"),
        ({"bf16": {"enabled": True}}, "bf16: remove it, and set train.precision"),
        (
            {"communication_data_type": "bf16"},
            "communication_data_type: DeepSpeed does not get it: sums of gradients are always "
            "fp32; remove it",
        ),
        (
            {ZERO: {"compute_grad_norm": False}},
            "zero_optimization.compute_grad_norm: DeepSpeed does not get it: checks of bad steps ",
        ),
        (
            {ZERO: {"reduce_bucket_sise": 9}},
            "zero_optimization.reduce_bucket_sise: DeepSpeed has no such setting; did you mean "
            "zero_optimization.reduce_bucket_size?",
        ),
        ({"qqq": 1}, "qqq: DeepSpeed has no such setting; remove it"),
        (
            {ZERO: {"stage3_prefetch_bucket_size": 9}},
            "zero_optimization.stage3_prefetch_bucket_size: has no effect with zero_stage 1; "
            "remove it, or set zero_stage 3 [",
        ),
        (
            {ZERO: {"offload_optimizer": {"pin_memory": True}}},
            "zero_optimization.offload_optimizer.pin_memory: has no effect without "
            "train.offload_optimizer; set that, or remove this",
        ),
        (
            {ZERO: {"reduce_bucket_size": "many"}},
            "zero_optimization.reduce_bucket_size: 'many': give a whole number",
        ),
        ({"wall_clock_breakdown": 1}, "wall_clock_breakdown: 1: give true or false"),
        ({"comms_logger": {"prof_ops": 1}}, "comms_logger.prof_ops: 1: give a list"),
        (
            {ZERO: {"reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size: 0: too small; give 1 or more",
        ),
        ({"steps_per_print": 0}, "steps_per_print: 0: too small; give 1 or more"),
        ({"log_level": "loud"}, "log_level: 'loud': give one of debug, info, warning, error, crit"),
        ({ZERO: 3}, "zero_optimization: 3: not a section; give its settings"),
        (
            {ZERO: {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device: remove it, and set train.offload_param",
        ),
    ],
)
def test_settings_of_the_json_file_that_conflict_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"deepspeed: {re.escape(message)}"):
        TrainSettings.model_validate({"backend": "deepspeed", "deepspeed": values})


def test_settings_of_buckets_are_refused_where_there_are_none() -> None:
    values = {"backend": "deepspeed", "zero_stage": 1, "precision": "bf16"}
    for key in sorted(OF_BUCKETS):
        name, kind = key.partition(".")[2], PASSED[key][0]
        passed = {"deepspeed": {ZERO: {name: {bool: True, int: 100}[kind]}}}
        message = f"deepspeed: {re.escape(key)}: has no effect with zero_stage 1 in bf16"
        with pytest.raises(ValueError, match=message):
            TrainSettings.model_validate(values | passed)
        for change in ({"zero_stage": 2}, {"offload_optimizer": "cpu"}, {"precision": "fp32"}):
            TrainSettings.model_validate(values | passed | change)


@pytest.mark.parametrize("value", [5e8, "5e8", "500000000", 500_000_000])
def test_whole_numbers_are_read_as_deepspeed_writes_them(value: Any) -> None:
    passed = {"zero_stage": 2, "deepspeed": {ZERO: {"reduce_bucket_size": value}}}
    train = TrainSettings.model_validate({"backend": "deepspeed", **passed})
    size = train.deepspeed[ZERO]["reduce_bucket_size"]
    assert (size, type(size)) == (500_000_000, int)


def test_the_native_back_end_has_no_settings_of_the_json_file() -> None:
    with pytest.raises(ValueError, match="deepspeed: only the back end deepspeed has these"):
        TrainSettings.model_validate({"deepspeed": {"wall_clock_breakdown": True}})


def test_each_setting_has_one_rule_and_names_an_existing_setting() -> None:
    assert len(PASSED) + len(OWN) + len(REFUSED) == len(KNOWN)
    names = {name for own in OWN.values() for name in re.findall(r"[a-z]\w+", own)}
    known = {*TrainSettings.model_fields, *type(TrainSettings().parallel).model_fields}
    assert names - known == {"and", "or", "the", "table", "of", "corpora"}


def test_the_tables_name_each_setting_that_deepspeed_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of DeepSpeed with a new setting fails here."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero import config as zero_config
    from deepspeed.runtime.zero import offload_config

    class Recorded(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    read: set[str] = set()
    DeepSpeedConfig(Recorded(train_batch_size=1))
    tops = {key.partition(".")[0] for key in KNOWN}
    assert read <= tops
    assert tops - read <= {"sequence_parallel_size"}  # read only without an mpu
    for section, model in {
        ZERO: zero_config.DeepSpeedZeroConfig,
        f"{ZERO}.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        f"{ZERO}.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "comms_logger": CommsLoggerConfig,
    }.items():
        below = {key.removeprefix(f"{section}.") for key in KNOWN if key.startswith(f"{section}.")}
        fields = {field.alias or name for name, field in model.model_fields.items()}
        assert fields <= {key.partition(".")[0] for key in below}, section


@pytest.mark.usefixtures("lone_rank")
def test_settings_of_the_json_file_reach_deepspeed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = prepare(tmp_path_factory.mktemp("passed"))
    plain = make_run(root, "plain", **zero(2))
    passed = {ZERO: {"reduce_bucket_size": 100, "allgather_bucket_size": 200}}
    config = make_run(root, "passed", **zero(2, deepspeed=passed))
    zero_settings = setup.settings(read_run(config), 1)[ZERO]
    assert passed[ZERO].items() <= zero_settings.items()
    assert zero_settings["stage"] == 2
    assert train_here(plain) == train_here(config) == 0
    assert losses(config) == pytest.approx(losses(plain), rel=1e-6)


OTHERS = {
    "log_level": "error",
    "steps_per_print": 2,
    f"{ZERO}.sub_group_size": 1000,
}
"""Values that are neither true nor small numbers."""
NOT_DEFAULT = {f"{ZERO}.reduce_scatter": False}


def passed_at(stage: int, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Settings of the section `train` with each setting that DeepSpeed gets at a ZeRO stage."""
    values: dict[str, Any] = {}
    for key, (kind, (low, high)) in PASSED.items():
        if low <= stage <= high and "offload" not in key and key not in without:
            default = {bool: True, int: 100, list: ["all_reduce"]}.get(kind)
            _put(values, key, OTHERS.get(key, NOT_DEFAULT.get(key, default)))
    return zero(stage, deepspeed=values)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


@pytest.mark.grid
@pytest.mark.ranks
def test_what_deepspeed_gets_changes_no_result(tmp_path_factory: pytest.TempPathFactory) -> None:
    runs = make_runs(tmp_path_factory.mktemp("json"))
    check(2, [("untied", passed_at(stage)) for stage in range(4)], runs)


@pytest.mark.grid
@pytest.mark.ranks
def test_it_trains_in_bf16_and_with_offloads(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = make_start(tmp_path_factory.mktemp("json") / "start", SHALLOW + "untied")
    changes = [
        settings | precision
        for stage in (1, 2, 3)
        for changes_json in (False, True)
        for precision in (BF16, {"offload_optimizer": "cpu"})
        for without in [OF_BUCKETS if stage == 1 and precision is BF16 else ()]
        for settings in [passed_at(stage, without=without) if changes_json else zero(stage)]
    ]
    results = spawn(train_all, 2, [Layout(config, each) for each in changes])[0]
    losses = [result["losses"] for result in results]
    for plain, changed in zip(losses[::4] + losses[1::4], losses[2::4] + losses[3::4], strict=True):
        assert changed == pytest.approx(plain, rel=1e-4)
