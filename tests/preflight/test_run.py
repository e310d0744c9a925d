"""Checks of a run before it starts."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.support.berts import bert
from tests.support.dense import SHARED_EXPERTS, dense
from tests.support.workflows import ARCHITECTURE
from tokamake.config.architecture import Architecture
from tokamake.config.objective import sample_settings
from tokamake.config.resolved_run import Run
from tokamake.config.train_sections import FimSettings
from tokamake.config.training import INDEX_SETTINGS, TrainSettings
from tokamake.errors import UserError
from tokamake.preflight import data, model
from tokamake.preflight import run as preflight_run
from tokamake.preflight.run import check_until_step
from tokamake.preflight.tokenizer import check_fim

TRAIN = {"train_steps": 10, "sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2}
MODEL: Any = {**ARCHITECTURE, "vocab_size": 100}
ROUNDS = {
    "pipeline_parallel_size": 4,
    "pipeline_schedule": "interleaved_1f1b",
    "virtual_pipeline_size": 2,
}


def make_run(*, step: int = 0, **train: Any) -> Run:
    return Run.model_validate(
        {
            **{"run": "a", "seed": 1, "checkpoint": "start", "step": step, "output": "out"},
            **{"index": "index", "data_root": "data", "architecture": MODEL},
            "train": {**TRAIN, **train},
        }
    )


def refused_unless(fits: bool, message: str) -> AbstractContextManager[object]:
    return nullcontext() if fits else pytest.raises(UserError, match=message)


def make_index(run: Run, *, samples: int = 80) -> dict[str, Any]:
    settings = {name: getattr(run.train, name) for name in INDEX_SETTINGS}
    return {**settings, "splits": {"train": {"samples": samples}}, "pairs": ["web"]}


def test_the_index_has_the_settings_and_samples_of_the_run() -> None:
    run = make_run()
    data.check_index(run, make_index(run))
    with pytest.raises(UserError) as caught:
        data.check_index(run, make_index(run, samples=79))
    assert str(caught.value) == (
        "index: has 79 training samples, train.train_steps take 80; run `tokamake index` again"
    )
    with pytest.raises(UserError, match="index: has 0 training samples"):
        data.check_index(run, {**make_index(run), "splits": {}})


@pytest.mark.parametrize("name", INDEX_SETTINGS)
def test_each_setting_of_the_index_is_compared(name: str) -> None:
    run = make_run()
    with pytest.raises(UserError) as caught:
        data.check_index(run, {**make_index(run), name: "other"})
    assert str(caught.value) == (
        f"index: has {name} other, train.{name} is {getattr(run.train, name)}; "
        "run `tokamake index` again"
    )


def test_the_samples_of_the_index_are_of_the_objective() -> None:
    masked = make_run(objective="masked")
    index = make_index(masked)
    with pytest.raises(UserError) as caught:
        data.check_index(masked, index)
    assert str(caught.value) == (
        "index: has samples of objective causal, train.objective is masked; run `tokamake index` "
        "again"
    )
    index["objective"] = {**sample_settings(masked.train), "tokens": {}}
    data.check_index(masked, index)
    with pytest.raises(
        UserError, match=r"has samples of objective masked, train\.objective is cau"
    ):
        data.check_index(make_run(), index)
    other = make_run(objective="masked", masking={"max_ngram": 2})
    with pytest.raises(
        UserError, match=r"index: has max_ngram 3, the run.s settings give 2; run `tok"
    ):
        data.check_index(other, index)


def test_a_family_learns_its_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"llama": ("causal",), "bert": ("masked",)}
    monkeypatch.setattr(model, "objectives", known.__getitem__)
    causal, masked = make_run().train, make_run(objective="masked").train
    names = model.plugins.names
    families = {model.FAMILIES: [*known]}
    monkeypatch.setattr(model.plugins, "names", lambda kind: families.get(kind) or names(kind))
    model.check_objective(causal, ARCHITECTURE_100)
    with pytest.raises(UserError) as caught:
        model.check_objective(masked, ARCHITECTURE_100)
    assert str(caught.value) == (
        "train.objective: masked: family llama learns causal; set it to causal, or choose a model "
        "of family bert"
    )
    monkeypatch.undo()
    assert model.objectives("llama") == ("causal",)


def test_losses_of_routers_need_routers() -> None:
    train = TrainSettings.model_validate(TRAIN | {"router": {"z_coefficient": 0.001}})
    with pytest.raises(UserError, match="router: has no effect: family llama has"):
        model.check_layout(train, Architecture(**MODEL))
    model.check_layout(train, Architecture(**MODEL | {"family": "mixtral"}))


def test_layers_that_predict_further_tokens_need_the_right_settings() -> None:
    factor = TrainSettings.model_validate(TRAIN | {"mtp": {"loss_scaling_factor": 0.1}})
    shape = dense("glm4_moe", **SHARED_EXPERTS)
    further = dense("glm4_moe", num_nextn_predict_layers=1, **SHARED_EXPERTS)
    with pytest.raises(UserError, match="mtp: has no effect: the model has no layers that predict"):
        model.check_layout(factor, shape)
    model.check_layout(factor, further)
    sophia = TrainSettings.model_validate(TRAIN | {"optimizer": {"name": "sophia_g"}})
    with pytest.raises(UserError, match="sophia_g: looks at labels of the next token alone"):
        model.check_layout(sophia, further)
    model.check_layout(sophia, shape)
    layout = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "pipeline_schedule": "zbv"}
    split = TrainSettings.model_validate(TRAIN | {"parallel": layout})
    deep = {**SHARED_EXPERTS, "num_hidden_layers": 4}
    with pytest.raises(UserError, match=r"zbv: computes gradients of weights late, .*use interl"):
        model.check_layout(split, dense("glm4_moe", num_nextn_predict_layers=1, **deep))
    model.check_layout(split, dense("glm4_moe", **deep))


def test_experts_are_divided_evenly() -> None:
    shape = Architecture(**MODEL | {"family": "qwen3_moe", "moe_intermediate_size": 27})
    train = TrainSettings.model_validate(TRAIN | {"parallel": {"tensor_parallel_size": 2}})
    with pytest.raises(UserError, match=r"2: does not divide 27 \(moe_intermediate_size\)"):
        model.check_layout(train, shape)


@pytest.mark.parametrize(
    ("family", "size", "refused"),
    [
        ("llama", 2, "expert_parallel_size: 2: llama has no experts; set 1"),
        (
            "mixtral",
            3,
            r"expert_parallel_size: 3: does not divide 8 \(experts\); give one of 1, 2, 4, 8",
        ),
    ],
)
def test_ranks_divide_experts_evenly(family: str, size: int, refused: str) -> None:
    shape = Architecture(**MODEL | {"family": family})
    train = TrainSettings.model_validate(TRAIN | {"parallel": {"expert_parallel_size": size}})
    with pytest.raises(UserError, match=f"^train.parallel.{refused}$"):
        model.check_layout(train, shape)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (
            {"expert_parallel_size": 8},
            "4 data-parallel × context-parallel ranks; give one of 1, 2, 4",
        ),
        (
            {"expert_parallel_size": 4, "data_parallel_replicate_size": 2},
            "2 data-parallel × context-parallel ranks of a group of data_parallel_replicate_size; "
            "give one of 1, 2",
        ),
    ],
)
def test_experts_are_divided_among_data_parallel_ranks(settings: Any, refused: str) -> None:
    size = settings["expert_parallel_size"]
    train = TrainSettings.model_validate(TRAIN | {"parallel": settings})
    with pytest.raises(UserError) as caught:
        preflight_run.check_ranks(train, 4)
    assert str(caught.value) == (
        f"train.parallel.expert_parallel_size: {size}: does not divide {refused}"
    )
    context = {"expert_parallel_size": 4, "context_parallel_size": 2}
    preflight_run.check_ranks(TrainSettings.model_validate(TRAIN | {"parallel": context}), 4)


def test_deepspeed_does_not_divide_experts() -> None:
    with pytest.raises(ValueError, match="expert_parallel_size: 2: DeepSpeed divides only experts"):
        TrainSettings.model_validate(
            TRAIN | {"backend": "deepspeed", "parallel": {"expert_parallel_size": 2}}
        )


def test_a_head_for_the_order_of_sentences_needs_such_samples() -> None:
    ordered = make_run(objective="masked").train
    parts = make_run(objective="masked", masking={"sentence_order": False}).train
    models = [bert(sentence_order_head=has_head) for has_head in (True, False)]
    model.check_objective(ordered, models[0])
    model.check_objective(parts, models[1])
    for train, shape, remedy in ((ordered, models[1], "false"), (parts, models[0], "true")):
        with pytest.raises(UserError, match=f"for the order of sentences; set it to {remedy}, or"):
            model.check_objective(train, shape)


def test_sequences_are_no_longer_than_the_model_allows() -> None:
    run = make_run(sequence_length=64)
    data.check_index(run, make_index(run))
    run = make_run(sequence_length=65)
    with pytest.raises(UserError, match=r"^train\.sequence_length: 65: more than the 64 max_po"):
        data.check_index(run, make_index(run))


@pytest.mark.parametrize(("world_size", "fits"), [(1, True), (4, True), (3, False), (8, False)])
def test_ranks_share_the_batch(world_size: int, fits: bool) -> None:
    train = TrainSettings(**TRAIN)  # type: ignore[arg-type]
    with refused_unless(fits, "global_batch_size: 8 samples cannot be shared by"):
        preflight_run.check_ranks(train, world_size)


@pytest.mark.parametrize(
    ("settings", "batch", "refused"),
    [
        ({"pipeline_parallel_size": 4}, 4, ""),
        ({"pipeline_parallel_size": 4}, 3, "steps of 3 micro batches leave ranks idle"),
        ({"data_parallel_replicate_size": 2}, 3, "3 samples cannot be shared by 2 data-parallel"),
        ({"context_parallel_size": 2, "expert_parallel_size": 2}, 1, ""),
        ({"expert_parallel_size": 2}, 1, "1 samples cannot be shared by 2 data-parallel"),
        (ROUNDS, 14, ""),  # on two data-parallel ranks; one rank has uneven rounds
        (ROUNDS, 11, "11 micro batches a step cannot be divided into equal rounds of 4"),
    ],
)
def test_there_are_ranks_for_a_layout_and_its_batches(
    settings: dict[str, Any], batch: int, refused: str
) -> None:
    changed = {"parallel": settings, "micro_batch_size": 1, "global_batch_size": batch}
    train = TrainSettings.model_validate(TRAIN | changed)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        preflight_run.check_some_ranks(train)


def test_each_size_of_a_batch_ramp_up_is_shared() -> None:
    train = TrainSettings.model_validate({**TRAIN, "rampup_batch_size": [4, 2, 16]})
    preflight_run.check_ranks(train, 1)
    with pytest.raises(UserError, match="6 samples cannot be shared by 2"):
        preflight_run.check_ranks(train, 2)


@pytest.mark.parametrize(
    ("precision", "schedule", "stages", "fits"),
    [
        ("bf16", "1f1b", 2, True),
        ("fp32", "zbv", 2, True),
        (None, "zbv", 2, True),
        ("bf16", "zbv", 1, True),
        ("bf16", "zbv", 2, False),
    ],
)
def test_gradients_are_not_added_up_in_low_precision(
    precision: str | None, schedule: str, stages: int, fits: bool
) -> None:
    virtual = 2 if schedule == "zbv" and stages > 1 else 1
    parallel = {
        "pipeline_schedule": schedule,
        "pipeline_parallel_size": stages,
        "virtual_pipeline_size": virtual,
    }
    message = f"parallel.pipeline_schedule: {schedule}: would add up gradients in {precision}; use"
    with nullcontext() if fits else pytest.raises(ValidationError, match=message):
        make_run(parallel=parallel, precision=precision)
    # Ranks know the precision that an empty one becomes.
    train = make_run(parallel=parallel).train.model_copy(update={"precision": precision})
    with refused_unless(fits, rf"^train\.{message}"):
        preflight_run.check_precision(train, torch.device("cpu"))


@pytest.mark.parametrize(
    ("deterministic", "device", "optimizer", "fits"),
    [
        (True, "cpu", "sophia_g", True),
        (False, "cuda", "sophia_g", True),
        (True, "cuda", "adamw", True),
        (True, "cuda", "sophia_g", False),
    ],
)
def test_optimizers_without_a_deterministic_algorithm_are_refused_on_accelerators(
    deterministic: bool, device: str, optimizer: str, fits: bool
) -> None:
    run = make_run(deterministic=deterministic, optimizer={"name": optimizer})
    place: Any = SimpleNamespace(type=device)
    with refused_unless(fits, r"^train\.deterministic: true: optimizer sophia_g has no"):
        preflight_run.check_deterministic(run, place)


ARCHITECTURE_100 = Architecture(**MODEL)


def test_every_token_has_an_embedding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stated: dict[str, int | None] = {"a": 100, "b": None, "c": None}
    monkeypatch.setattr(data, "stated_vocabulary", lambda path: stated[path.name])
    monkeypatch.setattr(data, "check_foreign", lambda _: 99)
    index = {"pairs": ["a", "b", "c"], "largest_tokens": {"b": 99}}
    data.check_vocabulary(ARCHITECTURE_100, index, data_root=tmp_path)
    with pytest.raises(UserError) as caught:
        data.check_vocabulary(
            ARCHITECTURE_100, {**index, "largest_tokens": {"b": 100}}, data_root=tmp_path
        )
    assert str(caught.value) == (
        f"{tmp_path}/b.bin: holds token 100, the model has 100 embeddings; tokenize again with the "
        "tokenizer of the checkpoint"
    )
    monkeypatch.setattr(data, "check_foreign", lambda _: 100)
    with pytest.raises(UserError, match=r"/c\.bin: holds token 100"):
        data.check_vocabulary(ARCHITECTURE_100, index, data_root=tmp_path)
    stated["a"] = 101
    with pytest.raises(UserError, match=r"/a\.json: tokens of a vocabulary of 101, the model has"):
        data.check_vocabulary(ARCHITECTURE_100, index, data_root=tmp_path)


def test_fill_in_the_middle_needs_a_tokenizer() -> None:
    with pytest.raises(UserError, match=r"^train\.fim\.rate: needs a tokenizer; give it with"):
        check_fim(FimSettings(rate=0.5), None)


@pytest.mark.parametrize(("until_step", "fits"), [(4, False), (5, True), (10, True), (11, False)])
def test_a_job_ends_within_the_run(until_step: int, fits: bool) -> None:
    run = make_run(step=4)
    message = f"until_step: {until_step}: the run goes from step 4 to 10; give one between them"
    with refused_unless(fits, f"^{message}$"):
        check_until_step(run, until_step)


def test_a_trial_needs_samples_for_its_steps() -> None:
    run = make_run()
    data.check_trial_samples(run, make_index(run, samples=24), num_steps=3)
    with pytest.raises(UserError, match="has 23 training samples, 3 steps take 24; lower --steps"):
        data.check_trial_samples(run, make_index(run, samples=23), num_steps=3)
