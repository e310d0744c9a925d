"""What a user asks for becomes what Snakemake can build, or one line that says why not."""

import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.workflow_configs import read_config, train, write_runs
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.detoxify import DetoxifyRules
from tokamake.workflow.retrieval import RetrievalRules
from tokamake.workflow.retro import RetroRules
from tokamake.workflow.segments import SegmentRules
from tokamake.workflow.targets import Targets
from tokamake.workflow.tasks import TaskRules

pytestmark = pytest.mark.usefixtures("workspace_here")

RULES: dict[str, tuple[set[str], list[str]]] = {
    "all": (set(), []),
    "describe": (set(), ["results/data/metadata.json"]),
    "tokenize": ({"batch"}, ["results/data/batches/tokenize/{batch}.json"]),
    "weigh": ({"run"}, ["results/data/{run}.weights.txt", "results/data/{run}.weights.hard.txt"]),
    "train": ({"run", "segment"}, ["results/{run}/train{segment}.json"]),
    "convert": ({"run", "form"}, ["results/{run}/convert/{form}"]),
    "import_checkpoint": ({"start"}, ["results/import/{start}"]),
    "plan_segments": ({"run"}, ["results/{run}/segments.json"]),
    "doctor": ({"place"}, ["results/doctor/{place}.json"]),
}
"""Wildcards and outputs of rules."""
NOTHING_TO_CONVERT = (
    "tokamake: import_checkpoint: every run starts from random weights, or from a checkpoint that "
    "training reads as it is; there is nothing to convert"
)
PATTERNS = {"run": "smoke|low|high", "segment": r"(\.\d+)?", "form": "[^/]+"}


class SnakemakeStandIn:
    """What `Targets` asks of Snakemake, for the rules above; a module's rules have a prefix."""

    def __init__(self, *, is_main_process: bool = True, prefix: str = "") -> None:
        self.is_main_process = is_main_process
        self._prefix = prefix

    def rule_names(self) -> list[str]:
        return [self._prefix + name for name in RULES]

    def is_rule(self, name: str) -> bool:
        return name in [*self.rule_names(), "deploy"]

    def original_name(self, name: str) -> str:
        is_own = name.startswith(self._prefix) and name != "deploy"
        return name.removeprefix(self._prefix) if is_own else ""

    def outputs(self, name: str) -> tuple[set[str], list[str]]:
        return RULES.get(name.removeprefix(self._prefix), (set(), ["deployed.txt"]))

    def is_produced(self, path: str) -> bool:
        return any(
            re.fullmatch(re.sub(r"\\{(\w+)\\}", _pattern, re.escape(output)), path)
            for _, outputs in RULES.values()
            for output in outputs
        )


def _pattern(wildcard: re.Match[str]) -> str:
    return f"(?:{PATTERNS.get(wildcard[1], '[^/]+')})"


def make_targets(*, snakemake: Any = None, **config: Any) -> Targets:
    checked = read_config(**config)
    segments = SegmentRules(checked, lambda run: f"results/{run}/segments.json")
    return Targets(
        checked,
        snakemake or SnakemakeStandIn(),
        checkpoints=CheckpointRules(checked),
        segments=segments,
        tasks=TaskRules(checked, segments),
        detoxify=DetoxifyRules(checked, CheckpointRules(checked)),
        retrieval=RetrievalRules(checked, is_main_process=True),
        retro=RetroRules(checked),
        doctor=cast("Any", SimpleNamespace(report="results/doctor/local-1-nodes-2-ranks.json")),
    )


def message(target: str, targets: Targets | None = None) -> str:
    """The line with which the workflow ends."""
    with redirect_stderr(StringIO()) as printed, pytest.raises(SystemExit, match="2"):
        (targets or make_targets()).expand([target])
    return printed.getvalue().removesuffix("\n")


def test_a_rule_of_runs_becomes_its_files_of_all_runs() -> None:
    targets = make_targets(runs=write_runs("run seed", "low 1", "high 2"))
    assert targets.expand(["weigh", "train"]) == {
        *(f"results/data/{run}.weights{split}.txt" for run in ("low", "high")
          for split in ("", ".hard")),
        "results/low/train.json", "results/high/train.json",
    }  # fmt: skip


def test_neighbors_are_of_objective_retro() -> None:
    assert message("find_neighbors") == (
        "tokamake: find_neighbors: no run of this config has train.objective: retro"
    )


def test_rules_without_a_run_stay_as_they_are() -> None:
    assert make_targets().expand(["all", "describe", "tokenize"]) == {"all", "describe", "tokenize"}


def test_files_and_rules_can_be_asked_for_together() -> None:
    path = "results/smoke/train.20.json"
    assert make_targets().expand(["train", path]) == {"results/smoke/train.json", path}
    assert make_targets().expand([]) == set()


def test_convert_makes_the_formats_of_the_config() -> None:
    targets = make_targets(convert=["hf-bf16", "mds-tp2"])
    assert targets.expand(["convert"]) == {
        "results/smoke/convert/hf-bf16", "results/smoke/convert/mds-tp2"
    }  # fmt: skip
    assert message("convert") == (
        "tokamake: convert: the config names no export format; list some, as in "
        "convert: [mds-tp2], or ask for one: results/RUN/convert/FORMAT"
    )


def test_import_checkpoint_has_nothing_to_do_for_random_weights() -> None:
    assert message("import_checkpoint") == NOTHING_TO_CONVERT


def test_import_checkpoint_has_nothing_to_do_for_native_checkpoints() -> None:
    Path("start").mkdir()
    Path("start/tokamake.json").touch()
    Path("tokenizer").mkdir()
    Path("tokenizer/tokenizer.json").touch()
    sections = {"model": {"checkpoint": "start"}, "tokenizer": {"path": "tokenizer"}}
    targets = make_targets(train=train(finetune=True), **sections)
    assert message("import_checkpoint", targets) == NOTHING_TO_CONVERT


def test_plan_segments_is_about_runs_whose_data_decide_their_length() -> None:
    table = "corpus\tfiles\tepochs\ncode\tresults/raw/code/*\t2\n"
    settings = train(train_steps=None, segment_steps=5)
    targets = make_targets(table=table, train=settings)
    assert targets.expand(["plan_segments"]) == {"results/smoke/segments.json"}
    assert message("plan_segments") == (
        "tokamake: plan_segments: there is nothing to plan: no run has train.segment_steps and "
        "the length of its corpora's epochs"
    )


def test_doctor_makes_the_report_of_the_profile() -> None:
    assert make_targets().expand(["doctor"]) == {"results/doctor/local-1-nodes-2-ranks.json"}


def test_rules_of_a_module_have_its_prefix_and_other_rules_stay() -> None:
    targets = make_targets(snakemake=SnakemakeStandIn(prefix="tokamake_"), convert=["hf"])
    assert targets.expand(["tokamake_train", "tokamake_convert", "deploy"]) == {
        "results/smoke/train.json", "results/smoke/convert/hf", "deploy"
    }  # fmt: skip


@pytest.mark.parametrize("segment", [".40", ".41"])
@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_no_segment_ends_at_the_last_step_or_later(stage: str, segment: str) -> None:
    path = f"results/smoke/{stage}{segment}.json"
    assert message(path) == (
        f"tokamake: {path}: run smoke ends at step 40; its last job makes "
        f"results/smoke/{stage}.json, and segments end at steps before"
    )


def test_a_run_of_unknown_length_may_have_any_segment() -> None:
    table = "corpus\tfiles\tepochs\ncode\tresults/raw/code/*\t2\n"
    targets = make_targets(table=table, train=train(train_steps=None, segment_steps=5))
    path = "results/smoke/train.4000.json"
    assert targets.expand([path]) == {path}


def test_a_path_is_the_same_from_the_current_folder_or_the_root() -> None:
    path = str(Path("results/smoke/train.json").absolute())
    assert make_targets().expand([path]) == {path}


def test_a_file_that_no_rule_makes_may_exist() -> None:
    Path("notes.txt").touch()
    assert make_targets().expand(["notes.txt"]) == {"notes.txt"}


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("results/smok/train.json", "no run is called smok; there is smoke"),
        ("detoxify", "this config detoxifies no model; give it the section detoxify"),
        ("tarin", "no rule has this name or writes this file; did you mean train?"),
        (
            "results/smoke/what",
            "no rule has this name or writes this file; `snakemake --list` lists the rules",
        ),
        (
            "elsewhere/smok/train.json",
            "no rule has this name or writes this file; `snakemake --list` lists the rules",
        ),
    ],
)
def test_an_unknown_target_is_one_line(target: str, problem: str) -> None:
    assert message(target) == f"tokamake: {target}: {problem}"


def test_a_job_does_not_check_its_targets() -> None:
    targets = make_targets(snakemake=SnakemakeStandIn(is_main_process=False))
    assert targets.expand(["results/smok/train.json"]) == {"results/smok/train.json"}
