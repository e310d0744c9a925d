"""Optimizer states in Megatron-LM's classic files: those of its own classes are read, ours loaded.

Gradients of the oracle's one step are the fp32 weights and its learning rate is 0, so that with
these betas each first moment is half the weight, and each second a quarter of its square: whoever
mixes up parameters, rows or halves gets other numbers.
"""

import inspect
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokamake.checkpoint import tensors, written
from tokamake.checkpoint.any_format import open_any
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.copies import check_copies
from tokamake.checkpoint.files import torch_files
from tokamake.checkpoint.opened import Layout, Opened, Progress, Target
from tokamake.checkpoint.regions import Source
from tokamake.checkpoint.zero.folder import SCHEDULE
from tokamake.checkpoint.zero.shards import SETTINGS
from tokamake.config import Architecture

SHAPE: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}
FAMILIES = {
    "llama": Architecture(**SHAPE),
    "llama-tied": Architecture(**{**SHAPE, "tie_word_embeddings": True}),
    "gpt2": Architecture(**{**SHAPE, "num_key_value_heads": 4}, family="gpt"),
    "gptbigcode": Architecture(**{**SHAPE, "num_key_value_heads": 1}, family="gpt"),
}
STEP, LR = 1.0, 0.0
BETAS = (0.5, 0.75)
PADDING = 6
"""Rows of the embedding, all of them on the last rank."""
SCALE = 1024.0
"""Of the loss in fp16."""
PROGRESS = Progress(1, 8, 64)
SCHEDULER = {
    "max_lr": 1e-3,
    "lr_warmup_steps": 0,
    "num_steps": 8,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 100,
    "min_lr": 0.0,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 100,
}
ORDER = (
    "embedding.word_embeddings.weight",
    "embedding.word_embeddings.norm",
    "embedding.position_embeddings",
    *("input_layernorm", "query_key_value", "attention.query.", "attention.key_value.", "dense."),
    *("post_attention_layernorm", "dense_h_to_4h", "dense_4h_to_h", "final_layernorm"),
    *("output_layer", "word_embeddings_for_head"),
)
"""Of a model in Megatron-LM, as its constructors make it; layers are in the order of numbers."""
WORDS = ("word_embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight")


@pytest.fixture(scope="module")
def megatron() -> Any:
    """megatron.core's optimizers and scalers, which ask for a GPU in some constants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        from megatron.core.optimizer import grad_scaler, optimizer
    made = types.ModuleType("megatron.core.optimizer.on_cpu")
    vars(made).update(__package__="megatron.core.optimizer", __file__=optimizer.__file__)
    for module in (grad_scaler, optimizer):
        text = inspect.getsource(module).replace("'torch.cuda.", "'torch.")
        text = text.replace(".cuda(torch.cuda.current_device())", "").replace("'cuda'", "'cpu'")
        exec(compile(text, str(module.__file__), "exec"), vars(made))
    return made


def random(architecture: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        f"model.{name}": torch.randn(tuple(shape), generator=generator)
        for name, shape in tensors.shapes(architecture).items()
    }


def in_memory(architecture: Architecture, known: dict[str, Tensor], **notes: Any) -> Opened:
    return Opened(
        "native", Path(), architecture, Source([], {}, known), progress=PROGRESS, notes=notes
    )


def named_parameters(state: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Of all stages of a file, in the order in which Megatron's optimizer gets them."""
    found = []
    for model in sorted(name for name in state if re.fullmatch(r"model\d*", name)):
        each = dict(torch_files.leaves(state[model]))
        assert [*each] == sorted(each, key=place)
        found += [*each.items()]
    return found


def place(name: str) -> tuple[int, int, int, bool]:
    """Where a parameter comes in a model: layers are between embedding and last norm."""
    number = next(n for n, part in enumerate(ORDER) if part in name)
    layer = re.search(r"layers\.(\d+)", name)
    part = 0 if name.startswith("language_model.embedding") else 1 if layer else 2
    return part, int(layer[1]) if layer else 0, number, name.endswith("bias")


def decays_first(name: str, shape: Any) -> int:
    return int(len(shape) < 2)


def decays_last(name: str, shape: Any) -> int:
    return int(len(shape) > 1)


def words_apart(name: str, shape: Any) -> int:
    return 1 if len(shape) < 2 else 2 if name.endswith(WORDS) else 0


Grouping = Callable[[str, Any], int]


def optimizer_of(
    megatron: Any, state: dict[str, Any], grouping: Grouping = decays_first
) -> tuple[Any, list[torch.nn.Parameter]]:
    """Megatron's optimizer of a file's model, not stepped yet, and its parameters."""
    from megatron.core.optimizer import OptimizerConfig

    groups: dict[int, list[torch.nn.Parameter]] = {}
    for name, tensor in named_parameters(state):
        parameter = torch.nn.Parameter(tensor.detach().clone())
        groups.setdefault(grouping(name, tensor.shape), []).append(parameter)
    flat = [parameter for _, group in sorted(groups.items()) for parameter in group]
    multiples = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    described = [
        {"params": group, "wd_mult": float(group[0].dim() > 1), **multiples}
        for _, group in sorted(groups.items())
    ]
    for number, group in enumerate(described):
        group["is_decoupled_lr"] = number == 2
        group["weight_decay"] = 0.1 * group["wd_mult"]
    base = torch.optim.AdamW(described, lr=LR, betas=BETAS, eps=1e-8)
    kind = flat[0].dtype
    if kind == torch.float32:
        return megatron.FP32Optimizer(base, OptimizerConfig(), None), flat
    scaler = None
    if kind == torch.float16:
        scaler = megatron.DynamicGradScaler(1.0, 1.0, 2.0, 0.5, 10, 2)
    config = OptimizerConfig(fp16=kind == torch.float16, bf16=kind == torch.bfloat16)
    return megatron.Float16OptimizerWithFloat16Params(base, config, scaler, None), flat


def as_apex(state: dict[str, Any]) -> None:
    """Steps in groups, as the Adam of Apex has them."""
    for each in state["state"].values():
        assert each.pop("step") == STEP
    for group in state["param_groups"]:
        group["step"] = int(STEP)


def trained(
    megatron: Any,
    folder: Path,
    architecture: Architecture,
    layout: Layout,
    dtype: str,
    *,
    grouping: Grouping = decays_first,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """A checkpoint whose weights have been written and whose optimizer is Megatron's."""
    exact = random(architecture)
    for kind in {dtype, "fp32"}:
        target = Target(layout, kind)
        written.write(folder / kind, in_memory(architecture, exact), "megatron", target)
    for file in (folder / dtype).rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        optimizer, _ = optimizer_of(megatron, state, grouping)
        whole = torch.load(folder / "fp32" / file.relative_to(folder / dtype), weights_only=False)
        groups: dict[int, list[Tensor]] = {}
        for name, tensor in named_parameters(whole):
            groups.setdefault(grouping(name, tensor.shape), []).append(tensor)
        masters = [tensor for _, group in sorted(groups.items()) for tensor in group]
        own = [each for group in optimizer.optimizer.param_groups for each in group["params"]]
        for parameter, tensor in zip(own, masters, strict=True):
            parameter.data.copy_(tensor)
            parameter.grad = tensor.clone()
        optimizer.optimizer.step()
        if dtype == "fp16":
            scale = {"scale": torch.tensor([SCALE]), "growth_tracker": 5, "hysteresis_tracker": 2}
            optimizer.grad_scaler.load_state_dict(scale)
        state["optimizer"] = optimizer.state_dict()
        if change:
            change(state["optimizer"] if dtype == "fp32" else state["optimizer"]["optimizer"])
        state["opt_param_scheduler"] = SCHEDULER
        torch.save(state, file)
    return folder / dtype


def assert_trained(found: Opened, architecture: Architecture) -> None:
    """See that all is there bit by bit, whatever the weights' number format."""
    check_copies(found.source)
    for name, exact in random(architecture).items():
        name = name.removeprefix("model.")
        weights = found.source.read(f"model.{name}")
        assert torch.equal(weights, exact.to(weights.dtype)), name
        if weights.dtype != torch.float32:
            assert torch.equal(found.source.read(f"master.{name}"), exact), name
        assert torch.equal(found.source.read(f"optimizer.exp_avg.{name}"), exact / 2), name
        second = found.source.read(f"optimizer.exp_avg_sq.{name}")
        assert torch.equal(second, exact * exact / 4), name
        assert found.source.number(f"optimizer.step.{name}") == STEP
    kinds = {"model": 1, "optimizer": 3} | ({"master": 1} if weights.dtype != torch.float32 else {})
    count = len(random(architecture))
    assert len([*found.source]) == sum(kinds.values()) * count
    assert found.unread == ()
    assert found.progress == PROGRESS
    assert found.notes[SETTINGS] == {
        "lr": LR,
        "betas": [*BETAS],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


LAYOUTS = [Layout(1), Layout(2), Layout(1, 2), Layout(2, 2), Layout(2, 2, 2), Layout(1, 2, 2)]


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_megatrons_own_optimizers_save_is_read_bit_by_bit(
    family: str, dtype: str, layout: Layout, megatron: Any, tmp_path: Path
) -> None:
    architecture = FAMILIES[family]
    found = open_any(trained(megatron, tmp_path, architecture, layout, dtype))
    assert found.layout == layout
    assert_trained(found, architecture)
    assert found.notes[SCHEDULE] == SCHEDULER
    if dtype == "fp16":
        assert found.notes["loss_scale"] == (SCALE, 5)


@pytest.mark.parametrize("grouping", [decays_last, words_apart])
@pytest.mark.parametrize("change", [None, as_apex])
def test_groups_of_other_megatrons_are_read(
    grouping: Grouping, change: Any, megatron: Any, tmp_path: Path
) -> None:
    architecture, layout = FAMILIES["llama-tied"], Layout(2, 2)
    folder = trained(
        megatron, tmp_path, architecture, layout, "bf16", grouping=grouping, change=change
    )
    assert_trained(open_any(folder), architecture)


WAYS = {"llama": "bf16", "llama-tied": "fp32", "gpt2": "fp16"}
"""Families and number formats."""


@pytest.fixture(scope="module", params=WAYS)
def ways(
    request: pytest.FixtureRequest, megatron: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Path]]:
    """A family, and one run of it by Megatron, in native and in universal."""
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    begin = trained(megatron, root / "begin", FAMILIES[family], Layout(2, 2, 2), WAYS[family])
    convert(source=begin, target=root / "native", format="native")
    convert(source=root / "native", target=root / "universal", format="universal")
    return family, [begin, root / "native", root / "universal"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_megatrons_own_optimizers_load_what_is_written(
    ways: tuple[str, list[Path]], layout: Layout, megatron: Any, tmp_path: Path
) -> None:
    """From Megatron's format, native and universal; all is there when it is read again."""
    family, sources = ways
    architecture, dtype = FAMILIES[family], WAYS[family]
    expected = trained(megatron, tmp_path / "own", architecture, layout, dtype)
    source = sources[LAYOUTS.index(layout) % len(sources)]
    target = tmp_path / "written"
    written.write(target, open_any(source), "megatron", Target(layout, dtype))
    found = open_any(target)
    assert found.layout == layout
    assert_trained(found, architecture)
    for file in target.rglob("model_optim_rng.pt"):
        other = expected / file.relative_to(target)
        assert_loads(megatron, file, torch.load(other, weights_only=False))


@pytest.mark.parametrize("format", ["native", "universal", "mds"])
def test_whole_runs_go_from_megatron_to_other_formats(
    ways: tuple[str, list[Path]], format: str, tmp_path: Path
) -> None:
    family, sources = ways
    layout = Layout(2, 1, 1, 3, 1) if format == "mds" else Layout()
    written.write(tmp_path / "a", open_any(sources[0]), format, Target(layout))
    assert_trained(open_any(tmp_path / "a"), FAMILIES[family])


def padding(checkpoint: Path) -> Iterator[Tensor]:
    """Rows of padding in moments and fp32 weights of a file."""
    (file,) = checkpoint.rglob("model_optim_rng.pt")
    for name, value in torch_files.leaves(torch.load(file, weights_only=False)["optimizer"]):
        if isinstance(value, Tensor) and value.shape[:1] == (256,):
            yield name, value[-PADDING:]


def test_padding_has_no_moments_and_the_mean_as_fp32_weights(megatron: Any, tmp_path: Path) -> None:
    begin = trained(megatron, tmp_path, FAMILIES["llama"], Layout(2), "bf16")
    convert(source=begin, target=tmp_path / "a", format="megatron")
    exact = random(FAMILIES["llama"])
    means = [
        exact[f"model.{name}.weight"].double().mean(0).float()
        for name in ("model.embed_tokens", "lm_head")
    ]
    found = [*padding(tmp_path / "a")]
    assert len(found) == 6
    for name, rows in found:
        if "fp32_from" in name:
            mean = means.pop(0)
            assert torch.equal(rows, mean.expand(PADDING, -1))
        else:
            assert not rows.any(), name


# What is left.


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    for file in folder.rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)
    return folder


def swap(state: dict[str, Any]) -> None:
    """As no Megatron counts: two parameters of different shapes change places."""
    numbers = state["optimizer"]["optimizer"]["param_groups"][0]["params"]
    numbers[0], numbers[1] = numbers[1], numbers[0]


def lose(state: dict[str, Any]) -> None:
    state["optimizer"]["optimizer"]["state"].pop(3)


def lose_master(state: dict[str, Any]) -> None:
    state["optimizer"]["fp32_from_fp16_params"][0].pop()


def chain(state: dict[str, Any]) -> None:
    state["optimizer"] = [state["optimizer"]] * 2


def add_kind(state: dict[str, Any]) -> None:
    state["optimizer"]["optimizer"]["state"][0]["more"] = torch.zeros(3)


@pytest.mark.parametrize("change", [swap, lose, lose_master, chain, add_kind])
def test_states_in_an_unknown_order_are_left_and_told(
    change: Any, megatron: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(trained(megatron, tmp_path, FAMILIES["llama"], Layout(2), "bf16"), change)
    found = open_any(folder)
    assert {key.partition(".")[0] for key in found.source} == {"model"}
    file = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    told = f"optimizer states in an order that is not known ({file})"
    assert found.unread == (told,)
    convert(source=folder, target=tmp_path / "hf", format="hf")
    assert f"left behind: {told}" in capsys.readouterr().out


def test_states_of_the_distributed_optimizer_are_left_and_told(
    megatron: Any, tmp_path: Path
) -> None:
    def share(state: dict[str, Any]) -> None:
        state["optimizer"]["optimizer"].pop("state")

    folder = changed(trained(megatron, tmp_path, FAMILIES["llama"], Layout(2), "bf16"), share)
    for rank in range(2):
        torch.save({}, folder / f"iter_0000001/mp_rank_{rank:02d}/distrib_optim.pt")
    found = open_any(folder)
    assert {key.partition(".")[0] for key in found.source} == {"model"}
    assert found.unread == ("states of Megatron-LM's distributed optimizer (distrib_optim.pt)",)


def test_a_checkpoint_before_the_first_step_has_no_states(megatron: Any, tmp_path: Path) -> None:
    def begin(state: dict[str, Any]) -> None:
        state["optimizer"]["state"] = {}

    folder = changed(trained(megatron, tmp_path, FAMILIES["llama"], Layout(1), "fp32"), begin)
    found = open_any(folder)
    assert {key.partition(".")[0] for key in found.source} == {"model"}
    assert found.unread == ()


def without_step(known: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in known.items() if ".step." not in key}


@pytest.mark.parametrize(
    ("edit", "notes", "told"),
    [
        (dict, {"optimizer": "adopt"}, "has states exp_avg, exp_avg_sq, step of adopt, not those"),
        (without_step, {}, "has states exp_avg, exp_avg_sq of adamw, not those of Adam"),
        (dict, {SETTINGS: {"lr": 1.0}}, "does not tell its optimizer's betas, epsilon, weight de"),
    ],
)
def test_states_that_megatron_could_not_go_on_with_are_left_and_told(
    edit: Any, notes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture, exact = FAMILIES["llama"], random(FAMILIES["llama"])
    known = dict(exact)
    for key, tensor in exact.items():
        name = key.removeprefix("model.")
        for kind, value in (
            ("exp_avg", tensor),
            ("exp_avg_sq", tensor),
            ("step", torch.tensor(7.0)),
        ):
            known[f"optimizer.{kind}.{name}"] = value
    settings = {SETTINGS: {"lr": LR, "betas": [*BETAS], "eps": 1e-8, "weight_decay": 0.1}}
    begin = in_memory(architecture, edit(known), **{**settings, **notes})
    written.write(tmp_path / "native", begin, "native", Target())
    convert(source=tmp_path / "native", target=tmp_path / "a", format="megatron")
    printed = capsys.readouterr()
    assert told in printed.err
    assert "Megatron-LM could not continue with its states" in printed.err
    assert "left behind: optimizer.exp_avg, optimizer.exp_avg_sq" in printed.out
    found = open_any(tmp_path / "a")
    assert {key.partition(".")[0] for key in found.source} == {"model"}


def assert_loads(megatron: Any, file: Path, expected: dict[str, Any]) -> None:
    """See that Megatron's optimizer has what it saved itself at this layout, but for padding."""
    state = torch.load(file, weights_only=False)
    optimizer, _ = optimizer_of(megatron, state)
    optimizer.load_state_dict(state["optimizer"])
    found = dict(torch_files.leaves(optimizer.state_dict()))
    for name, value in torch_files.leaves(expected["optimizer"]):
        if not isinstance(value, Tensor):
            assert found[name] == value, name
            continue
        rows = len(value) - PADDING if value.shape[:1] in ((256,), (128,)) else None
        assert torch.equal(
            found[name][:rows] if rows else found[name], value[:rows] if rows else value
        ), name
