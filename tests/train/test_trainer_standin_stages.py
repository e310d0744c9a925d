"""Whole stages on an accelerator, which a stand-in plays: they give what they give on the CPU.

Training with checkpoints, finetuning, evaluation and generation run as their commands do; only the
device that they find is another one.
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.support import finetunes, native_weights, question_files, standin_use
from tests.support.finetunes import run_here
from tests.support.llamas import write_confident
from tests.support.ranks import spawn
from tests.support.runs import losses, make_run, prepare, train_here, weights
from tests.support.standin_costs import Costs, counted
from tokamake import plugins
from tokamake.checkpoint.detect import open_any
from tokamake.evaluate.evaluate import evaluate
from tokamake.generate.generate import Ends, generate
from tokamake.inference.sampling_settings import BeamSettings, Sampling
from tokamake.train.hooks import stragglers
from tokamake.train.objectives._base import KIND, objective_class
from tokamake.train.objectives._tasks import TaskObjective
from tokamake.train.step_result import StepResult
from tokamake.train.trainer import Trainer

RUNS: dict[str, dict[str, Any]] = {
    "native": {},
    **{f"deepspeed {stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (0, 1, 3)},
}
"""Settings of training; ZeRO 2 is the optimizer of 1."""
TASKS = {"classification": finetunes.prepare, "retrieval": question_files.prepare_questions}
"""A finetuning for each objective whose samples are rows of files."""
SHORT = {
    "global_batch_size": 4,
    "train_steps": 2,
    "evaluation_interval": 1,
    "evaluation_steps": 1,
    "precision": "fp32",
}
"""Settings of all runs: the stand-in counts each operation, which takes long."""
Results = dict[str, Any]


def stages(folder: Path, sampled: Path, *, on_device: bool) -> dict[str, Results]:
    """Run each stage in a folder; results by stage."""
    folder.mkdir()
    os.environ["LOCAL_RANK"] = "0"  # for DeepSpeed
    if on_device:
        standin_use.use_with_deepspeed()
    prepare(folder)
    runs = {name: trained(folder, name, settings) for name, settings in RUNS.items()}
    tuned = {name: finetuned(folder / name, TASKS[name]) for name in TASKS}
    return {**runs, **tuned, **used(folder / "model", sampled)}


def trained(folder: Path, name: str, settings: dict[str, Any]) -> Results:
    """A run in two jobs: the second one continues from the checkpoint of the first."""
    config = make_run(folder, name, **SHORT, **settings)
    assert train_here(config, until_step=1) == 0
    assert train_here(config) == 0
    validated = losses(config, "validation_loss")
    return {"losses": losses(config), "validation": validated, "weights": weights(config)}


def finetuned(folder: Path, prepare_run: Any) -> Results:
    folder.mkdir()
    run = prepare_run(folder, rows=(14, 7), precision="fp32", evaluation_interval=2)
    epochs = run_here(run)["epochs"]
    numbers = [value for each in epochs for value in each.values() if isinstance(value, float)]
    exported = native_weights.read(open_any(run.output).path)[1]
    return {"epochs": numbers, "weights": exported}


def used(folder: Path, sampled: Path) -> dict[str, Results]:
    """Scores and samples of a model."""
    model = write_confident(folder, vocab_size=400, context=48)
    options: dict[str, Any] = {"checkpoint": model, "tokenizer": sampled / "tokenizer"}
    (text, *_) = sorted((sampled / "raw/docs").glob("*.jsonl"))
    scores, samples = folder / "scores.json", folder / "samples.json"
    evaluate(**options, data=(str(text),), max_tokens=150, output=scores)
    overall = json.loads(scores.read_text())["overall"]
    texts = []
    for choice in (
        {"sampling": Sampling(temperature=0.0)},
        {"sampling": Sampling(temperature=0.9, top_k=9, seed=3)},
        {"sampling": Sampling(seed=3), "logprobs": True},
        {"beams": BeamSettings(num_beams=2)},
    ):
        prompts = ("def ", "The")
        ends = Ends(max_new_tokens=6)
        generate(**options, prompts=prompts, ends=ends, output=samples, **choice)
        texts += [each["text"] for each in json.loads(samples.read_text())]
    return {"evaluation": {"loss": overall["loss"]}, "generation": {"texts": texts}}


@pytest.fixture(scope="module")
def results(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Results]]:
    """Results on the CPU, and on the stand-in."""
    root = tmp_path_factory.mktemp("stages")
    (on_cpu,) = spawn(stages_on_cpu, 1, root / "cpu", sampled)
    (on_device,) = spawn(stages_on_device, 1, root / "device", sampled)
    return [on_cpu, on_device]


def stages_on_cpu(folder: Path, sampled: Path) -> dict[str, Results]:
    return stages(folder, sampled, on_device=False)


def stages_on_device(folder: Path, sampled: Path) -> dict[str, Results]:
    return stages(folder, sampled, on_device=True)


@pytest.mark.parametrize("stage", [*RUNS, *TASKS, "evaluation", "generation"])
def test_a_stage_gives_what_it_gives_on_the_cpu(results: Any, stage: str) -> None:
    on_cpu, on_device = (each[stage] for each in results)
    assert on_cpu.keys() == on_device.keys()
    for name, expected in on_cpu.items():
        assert expected
        assert_close(on_device[name], expected)


def assert_close(values: Any, expected: Any) -> None:
    """Compare texts, numbers, or tensors by name."""
    if isinstance(expected, dict):
        assert values.keys() == expected.keys()
        for name, tensor in expected.items():
            assert isinstance(tensor, Tensor)
            assert (values[name] - tensor).abs().max() < 1e-5, name
    elif isinstance(expected, list) and isinstance(expected[0], str):
        assert values == expected
    else:
        assert values == pytest.approx(expected, rel=1e-5)


def test_each_objective_of_tasks_is_finetuned() -> None:
    names = plugins.names(KIND)
    assert {name for name in names if issubclass(objective_class(name), TaskObjective)} == {*TASKS}


LOOP = {
    "log_interval": 2,
    "log_layer_norms": True,
    "evaluation_interval": 100,
    "save_interval": 100,
    "on_bad_step": {"spike": "journal"},
}
"""Settings of a run whose steps are steady: hooks and the guard look at them, nothing is saved."""


def steps_of_the_loop(folder: Path) -> list[Costs]:
    """Costs of the steps of the trainer's whole loop."""
    standin_use.use()
    prepare(folder)
    config, costs = make_run(folder, "loop", **SHORT | LOOP | {"train_steps": 7}), list[Costs]()
    stragglers._LOOK_SECONDS = 1e9  # the device's product is timed once

    def counted_step(trainer: Trainer) -> StepResult | None:
        with counted() as of_step:
            result = step(trainer)
        costs.append(of_step)
        return result

    step = Trainer.step
    with patch.object(Trainer, "step", counted_step):
        assert train_here(config) == 0
    return costs


def test_a_steady_step_of_the_loop_waits_once(tmp_path: Path) -> None:
    """With all hooks, where a record is due, too."""
    (costs,) = spawn(steps_of_the_loop, 1, tmp_path)
    assert len(costs) == 7
    for of_step in costs[1:]:
        assert len(of_step.waits) == 1, of_step.waits
        assert not of_step.copies["unpinned"]
        assert not of_step.of_host
