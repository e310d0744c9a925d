"""Training by an objective on whole batches of samples, and the same by a plain model and torch."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.support.engines import build, parts, whole
from tests.support.runs import losses, make_run, prepare, records, train_here, weights
from tokamake import files
from tokamake.config.objective import sample_settings
from tokamake.config.resolved_run import Run, read_run, write_run
from tokamake.data.samples.index_folder import read_index
from tokamake.train import index_sampler
from tokamake.train.batch import SampleIds

SIZE, NUM_STEPS = 8, 3
"""Samples of a global batch, and steps."""
OPTIMIZER = {"optimizer": {"learning_rate": 0.01, "epsilon": 1e-3}}
"""Biases of keys do not change a softmax: a small epsilon would amplify their rounding errors."""
Results = dict[str, Any]
SamplesOf = Callable[[int], Any]
"""Samples of the global batch of a step: a tuple of arrays with a row for each sample."""


def template(root: Path) -> Run:
    """A run whose index and data serve any objective."""
    return read_run(make_run(prepare(root), "run"))


def train(layouts: list[Run], samples_of: SamplesOf) -> list[Results]:
    """Train each run on this rank."""
    results = []
    for run in layouts:
        engine = build(run)
        size, data = engine._run.train.micro_batch_size, engine.mesh.data
        firsts = range(data.rank * size, SIZE, size * data.size)

        def rows(step: int, size: int = size, firsts: range = firsts) -> list[Any]:
            samples = samples_of(step)
            slices = [slice(first, first + size) for first in firsts]
            return [type(samples)(*(array[part] for array in samples)) for part in slices]

        result: Results = {"validation": engine.validate(iter(rows(NUM_STEPS))).loss}
        steps = []
        for step in range(NUM_STEPS):
            numbers = step * SIZE + np.array([[*range(at, at + size)] for at in firsts])
            ids = SampleIds(numbers)  # for dropout
            rates = {"learning_rate": 0.01, "weight_decay": 0.1}
            steps.append(engine.train_step(rows(step), **rates, samples=ids))
        for name in ("loss", "grad_norm", "sample_loss", "layer_norms", "num_rows"):
            result[name] = [getattr(done, name) for done in steps]
        measured = engine.validate(iter(rows(NUM_STEPS)))
        result |= {"validation after": measured.loss, "metrics": measured.metrics}
        if engine._run.train.backend == "native":
            result["weights"] = [part for c in engine._chunks for part in parts(c, c.local)]
        results.append(result)
    return results


def plain_training(
    model: Any,
    samples_of: SamplesOf,
    their_loss: Callable[[Any, Any], torch.Tensor],
    *,
    decays: Callable[[torch.Tensor], bool] = lambda parameter: parameter.dim() > 1,
) -> Results:
    """Train another package's model with torch's AdamW in one process."""
    parameters = [*model.parameters()]
    groups = [
        {"params": [p for p in parameters if decays(p) == is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-3)
    result: Results = {"loss": [], "grad_norm": []}
    result["validation"] = their_loss(model, samples_of(NUM_STEPS)).item()
    for step in range(NUM_STEPS):
        loss = their_loss(model, samples_of(step))
        optimizer.zero_grad()
        loss.backward()
        result["loss"].append(loss.item())
        result["grad_norm"].append(torch.nn.utils.clip_grad_norm_(parameters, 0.5).item())
        optimizer.step()
    result["validation after"] = their_loss(model, samples_of(NUM_STEPS)).item()
    return result


def assert_trained(results: tuple[Results, ...], expected: Results, layout: Results) -> None:
    """Compare the results of all ranks at a layout with a plain training, and their weights."""
    for result in results:
        for name in ("loss", "grad_norm", "validation", "validation after", "metrics"):
            assert result[name] == pytest.approx(expected[name], rel=1e-5), (name, layout)
        assert (min(result["num_rows"]) < SIZE) == ("pack_samples" in layout), layout
    if "weights" in results[0]:
        trained = whole(result["weights"] for result in results)
        assert trained.keys() == expected["weights"].keys()
        for name, tensor in expected["weights"].items():
            torch.testing.assert_close(trained[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def assert_as_if_alone(results: list[list[Results]], expected: Results) -> None:
    """Compare each result of each rank with the one of a single process."""
    for of_rank in results:
        for result in of_rank:
            for name in ("loss", "grad_norm", "validation after"):
                assert result[name] == pytest.approx(expected[name], rel=1e-5)


class Rows:
    """Records of the samples of a step; a tuple of one array."""

    def __init__(self, records: npt.NDArray[Any]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        yield self.records

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        field: npt.NDArray[Any] = self.records[name]
        return field


class Records:
    """Samples of a split as the loader has them."""

    corpora = ("corpus",)

    def __init__(self, arrays: list[Any]) -> None:
        self._records = np.concatenate(arrays)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, sample: int) -> Any:
        return self._records[sample : sample + 1].reshape(())


def trained_by_jobs(
    run: Run,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    of_split: Callable[[int], Records],
    jobs: dict[str, list[tuple[int | None, Results]]],
) -> list[Path]:
    """Train runs on records of an objective, with the trainer; return the run.yaml of each run.

    `of_split` makes records of a number of samples; `jobs` has, by the name of a run, the last step
    and the settings of each of its jobs.
    """
    shutil.copytree(run.index, folder / "index")
    content = {**read_index(run.index), "objective": sample_settings(run.train)}
    del content["digest"]
    described = {**content, "digest": files.digest(content)}
    files.write_json(folder / "index/index.json", described)
    monkeypatch.setattr(index_sampler, "training_samples", lambda *_, **__: of_split(80))
    monkeypatch.setattr(index_sampler, "open_samples", lambda *_, **__: of_split(16))
    configs = []
    for name, of_run in jobs.items():
        configs.append(folder / name / "run.yaml")
        for stop, settings in of_run:
            changed = {"index": folder / "index", "output": folder / name / "training"}
            train_settings = run.train.model_copy(update=settings)
            write_run(configs[-1], run.model_copy(update={**changed, "train": train_settings}))
            assert train_here(configs[-1], until_step=stop) == 0
    return configs


def assert_same_curves(config: Path, whole_run: Path, *keys: str) -> None:
    """Compare the records of a run in two jobs with the same run in one, and the weights."""
    for key in keys:
        assert losses(config, key) == losses(whole_run, key)
    trained = [record["loss"] for record in records(whole_run) if "loss" in record]
    assert len(trained) == 6
    assert trained[-1] < trained[0]
    continued = weights(config)
    for name, tensor in weights(whole_run).items():
        assert torch.equal(continued[name], tensor)
