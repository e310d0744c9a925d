"""Random compositions of everything that decides a step train as one process does.

`make test` proves 60 of them, which have each value of each axis; `make test-all` proves 1,000 or
more, which have each pair of values; `make compositions` proves as many as have each pair five
times.
"""

import pickle
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support import plug_ins, standin_use
from tests.support.composition_axes import (
    FAMILIES,
    KINDS,
    NOT_OF_A_LAYOUT,
    NOT_OF_A_STEP,
    NUMBERS_OF_UPDATES,
    OF_SAMPLES,
    OF_TASKS,
    SHAPE,
    SLOW,
    axes,
    learner_axes,
    objective_axes,
    tasks,
)
from tests.support.compositions import Composition, known_plug_ins, learners
from tests.support.drawn_compositions import TIMES, Drawing, drawing, learners_of_pairs, together
from tests.support.grids import cover
from tests.support.paths import ROOT
from tests.support.planted_faults import faulty_source, prove_with
from tests.support.proved_compositions import assert_proved, shrunk
from tests.support.ranks import spawn
from tests.support.shared_folders import made_once
from tests.support.standin_costs import counted
from tests.support.wrong_factors import FAULTS
from tokamake import plugins
from tokamake.config.objective import SECTIONS as OBJECTIVE_SECTIONS
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.training import TrainSettings
from tokamake.prove.comparison import differences
from tokamake.prove.planned_runs import read_any
from tokamake.runtime.ranks import Ranks

SECTIONS = {"parallel", "optimizer", "dropout", "router", "objective"}
"""Sections of `train` whose settings are axes of their own."""
SIXTY = 60
THOUSAND = 1000
PARTS = {1: 20, TIMES: 60}
"""Parts in which compositions with each pair once, or more often, are proved: some minutes of
one core each."""
MARKS = {1: [pytest.mark.grid], TIMES: [pytest.mark.grid, pytest.mark.compositions]}
"""For the times of each pair."""


def made(factory: pytest.TempPathFactory, least: int, times: int = 0) -> Drawing:
    """A drawing, which all workers of a run of pytest share."""

    def make(folder: Path) -> None:
        (folder / "drawing").write_bytes(pickle.dumps(drawing(least, times)))

    path = made_once(factory, f"compositions-{least}-{times}", make) / "drawing"
    shared: Drawing = pickle.loads(path.read_bytes())
    return shared


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drawing:
    """Compositions with each pair of values; the parameter: how often."""
    return made(tmp_path_factory, THOUSAND, request.param)


@pytest.fixture(scope="module")
def stratified(tmp_path_factory: pytest.TempPathFactory) -> list[Composition]:
    """Compositions of few ranks, but two or more, that have each value of each axis, family,
    objective and task, and each two kinds of parallelism together."""
    drawn = [each for each in made(tmp_path_factory, 4 * SIXTY).drawn if each.world_size > 1]
    chosen = cover(drawn, values_and_kinds, cost=work)
    rest = [each for each in drawn if each not in chosen]
    return chosen + sorted(rest, key=work)[: SIXTY - len(chosen)]


def work(composition: Composition) -> int:
    """Passes of micro batches through layers, on all ranks and in the process alone, which decide
    the time of a proof; the start of a rank costs as much as three."""
    passes = composition.num_layers * composition.value("num_micro_batches")
    return (composition.world_size + 1) * (passes + 3)


def values_and_kinds(composition: Composition) -> set[Any]:
    """Values of axes, and two kinds of parallelism that are in use together."""
    used = [each for each in kinds() if each in composition.axes and composition.value(each) > 1]
    return {*composition.facts.items(), *combinations(used, 2)}


def kinds() -> list[str]:
    """Axes that divide work among ranks."""
    return [axis for axis in axes() if axis.endswith("parallel_size")]


@pytest.mark.ranks
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("ranks", ["two", "more"])
def test_compositions_train_as_one_process(
    stratified: list[Composition], ranks: str, part: int
) -> None:
    """Compositions with as many ranks share processes, whose first steps are slow."""
    chosen = [each for each in stratified if (each.world_size == 2) == (ranks == "two")][part::2]
    assert chosen
    assert_proved(chosen)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("whole", "part"),
    [
        pytest.param(times, slice(part, None, parts), marks=MARKS[times], id=f"{times}-{part}")
        for times, parts in PARTS.items()
        for part in range(parts)
    ],
    indirect=["whole"],
)
def test_each_composition_trains_as_one_process(
    whole: Drawing, stratified: list[Composition], part: slice
) -> None:
    rest = [each for each in whole.drawn if each not in stratified]
    assert_proved(sorted(rest, key=lambda each: each.world_size)[part])


@pytest.mark.parametrize(
    ("whole", "times"),
    [pytest.param(times, times, marks=mark) for times, mark in MARKS.items()],
    indirect=["whole"],
)
def test_compositions_have_each_possible_pair_of_values(whole: Drawing, times: int) -> None:
    """Each pair that tokamake does not refuse; prints counts by axis."""
    possible = {pair: n for pair, n in whole.counts.items() if pair not in whole.refused}
    by_axis: dict[str, list[int]] = {}
    for pair, count in possible.items():
        for axis, _ in pair:
            by_axis.setdefault(axis, []).append(count)
    print(f"{len(whole.drawn):,} compositions")
    print(f"{len(possible):,} possible pairs, {len(whole.refused):,} refused")
    for axis, counts in sorted(by_axis.items()):
        print(f"{axis:50} {len(counts):6,} pairs, {min(counts):3} to {max(counts):4} times")
    assert len(whole.drawn) >= THOUSAND
    assert len(whole.refused) < 0.06 * len(whole.counts)  # a check that refuses more shows here
    assert min(possible.values()) >= times
    for number in (3, 4):
        for kinds in combinations(KINDS, number):
            assert sum(together(kinds, each) for each in whole.drawn) >= times
    for pair, reason in whole.refused.items():
        assert not whole.counts[pair]
        assert not reason.endswith(" ranks"), (pair, reason)  # too many of them for this machine


def test_sixty_compositions_have_each_value(stratified: list[Composition]) -> None:
    seen = set[Any]().union(*map(values_and_kinds, stratified))
    facts = {fact for pair in learners_of_pairs() for fact in pair}
    assert facts | {*combinations(kinds(), 2)} == seen
    assert len(stratified) == SIXTY


def test_a_composition_prints_the_config_that_reproduces_it(
    stratified: list[Composition], tmp_path: Path
) -> None:
    for number, each in enumerate(stratified):
        path = tmp_path / f"{number}.yaml"
        path.write_text(each.config, encoding="utf-8")
        (run,) = read_any(path, None)
        own = each.run()
        if each.objective in tasks():  # rows of a file decide the steps of an epoch
            lengths = {"train_steps": 0, "evaluation_interval": 0}
            run, own = (
                one.model_copy(update={"train": one.train.model_copy(update=lengths)})
                for one in (run, own)
            )
        assert (run.train, run.architecture, run.seed) == (own.train, own.architecture, each.seed)


def test_each_setting_is_an_axis_or_is_named() -> None:
    names = {axis.partition(".")[0] for axis in axes()} | SECTIONS
    objectives = {*plugins.names("train/objectives/*/objective")}
    assert {*TrainSettings.model_fields} - objectives == names & {
        *TrainSettings.model_fields
    } | NOT_OF_A_STEP | SLOW
    for section in ("parallel", "router", "mtp", "dropout"):
        fields = TrainSettings.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        assert {f"{section}.{name}" for name in fields} <= {*axes()}
    of_optimizers = {axis.removeprefix("optimizer.") for axis in axes() if "optimizer." in axis}
    assert {*OptimizerSettings.model_fields} == of_optimizers | NUMBERS_OF_UPDATES
    for objective, section in OBJECTIVE_SECTIONS.items():
        own = {f"{objective}.{name}" for name in section.model_fields}
        without = {f"{objective}.{name}" for name in section.without_effect}
        assert own == {*objective_axes(objective)} | (own & OF_SAMPLES) | without
    for family in plugins.names("models/*/model"):
        settings = plugins.constant("models/*/model", family, "SETTINGS")
        numbers = {name for name, values in settings.items() if not isinstance(values, tuple)}
        drawn = {*FAMILIES.get(family, {}), *SHAPE, *OF_TASKS, *NOT_OF_A_LAYOUT}
        assert {each for each in numbers if f"architecture.{each}" not in axes()} <= drawn, family


def test_each_family_and_each_kind_of_task_is_learned() -> None:
    families, objectives = zip(*learners(), strict=True)
    assert {*families} == {*plugins.names("models/*/model")}
    assert {*objectives} >= {*tasks()}


def test_a_new_family_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = {"models/mixture": ROOT / "tests/support/mixture"}
    plug_ins.add(tmp_path / "library", monkeypatch, new)
    cached = (axes, learners, learner_axes, learners_of_pairs, tasks)
    for function in cached:
        function.cache_clear()
    try:
        with known_plug_ins():
            made = Drawing()
            family = next(fact for pair in made.counts for fact in pair if fact[1] == "mixture")
            while not any(each.family == "mixture" for each in made.drawn):
                made.draw()
            drawn = made.drawn[-1]
            assert family == ("family", "mixture")
            assert drawn.run().architecture.family == "mixture"
            assert "architecture.tie_word_embeddings" in drawn.axes
    finally:
        for function in cached:
            function.cache_clear()


@pytest.mark.ranks
@pytest.mark.grid
def test_rounding_in_16_bits_is_no_error() -> None:
    """Lion turns small gradients into whole steps; a token chooses another expert."""
    tensor = {"parallel.tensor_parallel_size": 2, "parallel.sequence_parallel": True}
    masked = {"eod_mask_loss": True, "reset_attention_mask": True, "reset_position_ids": True}
    grows = {"num_micro_batches": 4, "rampup_batch_size": "grows", "micro_batch_size": 3}
    signs = {
        **tensor,
        **masked,
        **grows,
        "parallel.context_parallel_size": 2,
        "parallel.tensor_parallel_size": 4,
        "layers_of_stage": 2,
        "zero_stage": 1,
        "architecture.num_key_value_heads": 1,
        "recompute_granularity": "selective",
        "precision": "bf16",
        "rope_type": "linear",
        "gradient_clipping": 0.0,
    }
    choices = {
        **tensor,
        **masked,
        **grows,
        "micro_batch_size": 2,
        "parallel.pipeline_parallel_size": 2,
        "parallel.pipeline_layers": "uneven",
        "architecture.num_experts_per_tok": 1,
        "architecture.head_dim": 16,
        "architecture.sliding_window": 5,
        "dropout.attention": 0.1,
        "dropout.embedding": 0.1,
        "optimizer.name": "muon",
        "precision": "fp16",
    }
    assert_proved(
        [
            Composition("olmo2", "causal", signs | {"optimizer.name": "lion"}, 8748),
            Composition("olmo2", "causal", signs, 2),
            Composition("mixtral", "causal", choices, 5012),
        ]
    )


def test_each_fault_changes_the_source_as_it_is_now() -> None:
    for name, fault in FAULTS.items():
        assert faulty_source(fault), name


ALWAYS_FOUND = ["norms_decayed_of_lion", "losses_of_routers_doubled"]
"""A fault that is small beside all updates, and one of another trainer."""
FAULTS_OF_A_PART = 12
"""Faults that ranks prove one after the other: the first steps of a process are slow."""


def parts_of_faults() -> Iterator[list[str]]:
    """Names of all other faults, by number of ranks; those of the same composition together."""
    rest = [name for name in FAULTS if name not in ALWAYS_FOUND]
    shown_by = {name: FAULTS[name].shown_by for name in rest}
    for size in sorted({each.world_size for each in shown_by.values()}):
        names = [name for name in rest if shown_by[name].world_size == size]
        names.sort(key=lambda name: str(shown_by[name]))
        for start in range(0, len(names), FAULTS_OF_A_PART):
            yield names[start : start + FAULTS_OF_A_PART]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "names",
    [
        ALWAYS_FOUND,
        *(pytest.param(names, marks=pytest.mark.grid) for names in parts_of_faults()),
    ],
    ids=lambda names: f"{names[0]}-and-{len(names) - 1}",
)
def test_wrong_factors_are_found(names: list[str]) -> None:
    (size,) = {FAULTS[name].shown_by.world_size for name in names}
    proved = spawn(prove_with, size, [(name, FAULTS[name]) for name in names])[0]
    assert [name for each in proved for name in each.with_fault if not each.with_fault[name]] == []
    assert [each.without for each in proved if each.without] == []
    assert sum(len(each.with_fault) for each in proved) == len(names)


@pytest.mark.ranks
def test_a_proof_on_an_accelerator_adds_up_nothing_on_the_host() -> None:
    """NCCL adds up tensors of the device alone; a stand-in plays the device."""
    (found,) = spawn(prove_on_stand_in, 1)
    assert found == ([], [])


def prove_on_stand_in() -> tuple[list[str], list[str]]:
    device = standin_use.use()
    run = Composition("llama", "causal", {}, 3).run()
    with counted() as costs:
        found = differences(run, Ranks(0, 1, 0, 1), device=device)
    return found, [each for each in costs.of_host if each.startswith("allreduce")]


SENSITIVE = [
    Composition("qwen3", "causal", values | {"data_parallel_size": 2}, 5685)
    for values in (
        {
            "optimizer.name": "lion",
            "micro_batch_size": 3,
            "layers_of_stage": 4,
            "architecture.tie_word_embeddings": True,
            **{f"dropout.{name}": 0.1 for name in ("hidden", "attention", "embedding")},
        },
        {"optimizer.name": "muon", "layers_of_stage": 4, "zero_stage": 3},
    )
]
"""Runs whose optimizers turn rounding of gradients into larger changes of weights."""


@pytest.mark.ranks
@pytest.mark.grid
def test_rounding_is_no_difference() -> None:
    assert_proved(SENSITIVE)


def test_a_composition_that_fails_is_shown_in_its_smallest_form(
    stratified: list[Composition],
) -> None:
    drawn = next(
        each
        for each in stratified
        if each.value("parallel.tensor_parallel_size") == 2 and len(each.values) > 4
    )
    smallest = shrunk(drawn, lambda each: each.value("parallel.tensor_parallel_size") == 2)
    assert smallest.values == {"parallel.tensor_parallel_size": 2}
    assert smallest.world_size == 2
