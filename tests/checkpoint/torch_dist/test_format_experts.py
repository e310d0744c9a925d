"""Distributed checkpoints of megatron.core with shared experts, latent attention, sinks and MTP."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint.torch_dist.conftest import ONE, run
from tests.checkpoint.torch_dist.test_format import assert_same
from tests.support import dist_cores
from tests.support.dist_cores import Sizes
from tests.support.shared_folders import made_once
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.model_tensors import WITHOUT_GRADIENT
from tokamake.checkpoint.tensors.checkpoint import Checkpoint

NAMES = (
    "deepseek_v3:bf16/fully_reshardable",
    "deepseek_v2/dp_reshardable",
    "glm4_moe:bf16/dp_reshardable",
    "gpt_oss/fully_reshardable",
    "gpt_oss/dp_reshardable",
)
RANKS = {
    "stages": (Sizes(1, 2, 2, 2), ("deepseek_v3/fully_reshardable", "glm4_moe/dp_reshardable")),
    "tensor": (Sizes(2, 1, 2, 2), ("glm4_moe/fully_reshardable", "glm4_moe:bf16/dp_reshardable")),
}
"""Expert-parallel ranks with pipeline ranks, or with tensor-parallel ranks."""


def saved_name(name: str) -> str:
    case, _, kind = name.partition("/")
    case, _, dtype = case.partition(":")
    return f"{case}-{kind}{dtype and '-'}{dtype}"


@pytest.fixture(scope="module")
def expert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a single rank."""

    def make(folder: Path) -> None:
        run("save", folder / "one", ONE, *NAMES)

    return made_once(tmp_path_factory, "torch-dist-experts", make) / "one"


def assert_states_belong_to_weights(checkpoint: Checkpoint) -> None:
    """Check the states of the single step of `dist_cores`, whose gradients were the weights."""
    source = checkpoint.source
    assert not checkpoint.unread
    biases = 0
    for key in (key for key in source if key.startswith("model.")):
        name = key.removeprefix("model.")
        if name.endswith(WITHOUT_GRADIENT):
            biases += 1
            assert f"optimizer.exp_avg.{name}" not in source
            assert source.read(key).any()
            continue
        assert source.number(f"optimizer.step.{name}") == 1
        gradient = 2 * source.read(f"optimizer.exp_avg.{name}")
        is_rounded = source.read(key).dtype != torch.float32
        exact = source.read(f"master.{name}") if is_rounded else source.read(key)
        # Stacks of biases of experts do not decay.
        decays = gradient.dim() - (".experts." in name and "shared" not in name) > 1
        decay = 1 - dist_cores.LR * dist_cores.DECAY if decays else 1
        step = dist_cores.LR * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(exact, gradient * decay - step, rtol=1e-5, atol=1e-6, msg=name)
    shape = checkpoint.architecture
    assert biases == (len(shape.expert_layers) if shape.has_router_biases else 0)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_the_classic_checkpoint(name: str, expert_folder: Path) -> None:
    """tests/checkpoint/megatron compares logits of classic checkpoints with megatron.core."""
    saved = open_any(expert_folder / saved_name(name))
    assert_states_belong_to_weights(saved)
    assert_same(open_any(expert_folder / saved_name(name) / "classic/iter_0000007"), saved)


def test_megatron_core_loads_what_native_checkpoints_become(
    expert_folder: Path, tmp_path: Path
) -> None:
    starts = {"deepseek_v3": NAMES[0], "gpt_oss": NAMES[4]}
    for case, name in starts.items():
        native, there, back = (tmp_path / kind / case for kind in ("native", "there", "back"))
        convert(source=expert_folder / saved_name(name), target=native, format="native")
        convert(source=native, target=there, format="torch-dist")
        convert(source=there, target=back, format="native")
        assert_same(open_any(native), open_any(back))
    loads = [f"{tmp_path}/there/{case}/fully_reshardable" for case in starts]
    run("load", tmp_path / "loaded", ONE, *loads)
    for case in starts:
        loaded = open_any(tmp_path / "loaded" / case / "fully_reshardable")
        assert_same(open_any(tmp_path / "there" / case), loaded)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_classic_files_of_all_kinds_of_ranks_keep_states(
    zero_stage: int, expert_folder: Path, tmp_path: Path
) -> None:
    for name, tensor in ((saved_name(NAMES[2]), 2), (saved_name(NAMES[4]), 1)):
        convert(
            source=expert_folder / name,
            target=tmp_path / name,
            format="megatron",
            tensor_parallel_size=tensor,
            pipeline_parallel_size=2,
            expert_parallel_size=2,
            zero_stage=zero_stage,
        )
        assert len([*tmp_path.glob(f"{name}/iter_*/mp_rank_*")]) == 4 * tensor
        assert_same(open_any(expert_folder / name), open_any(tmp_path / name))


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize("layout", RANKS)
def test_checkpoints_of_several_ranks_are_read(layout: str, tmp_path: Path) -> None:
    sizes, cases = RANKS[layout]
    run("save", tmp_path / "saved", sizes, *cases)
    for name in map(saved_name, cases):
        saved = open_any(tmp_path / "saved" / name)
        assert_states_belong_to_weights(saved)
        classic = open_any(tmp_path / "saved" / name / "classic/iter_0000007")
        assert classic.layout.expert_parallel_size == 2
        assert_same(classic, saved)
