"""The memory of weights on a rank, against the tensors that ranks hold."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import hf_folder
from tests.support.families import FAMILIES, weights
from tests.support.ranks import spawn
from tokamake.checkpoint.detect import open_any
from tokamake.errors import UserError
from tokamake.inference.layout import WHOLE_MODEL, Dtype, InferenceLayout, Peers, peers
from tokamake.inference.memory import cache_bytes, memory_warning, weight_bytes
from tokamake.inference.model import InferenceModel
from tokamake.runtime.ranks import Ranks

SHAPE, CPU = FAMILIES["llama-gqa"], torch.device("cpu")
LAYOUTS = [
    InferenceLayout(),
    InferenceLayout(dtype="bf16"),
    InferenceLayout(tensor_parallel_size=2),
    InferenceLayout(pipeline_parallel_size=2, dtype="bf16"),
    InferenceLayout(fsdp=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "hf"
    hf_folder.write(path, SHAPE, weights(SHAPE))
    return path


def held(folder: Path) -> list[int]:
    """Bytes of weights that this rank holds in each layout, between passes."""
    peers, sizes = Peers(Ranks(dist.get_rank(), dist.get_world_size(), 0, 1), CPU), []
    for layout in LAYOUTS:
        model = InferenceModel(open_any(folder), layout, peers=peers)
        local = (getattr(p, "_local_tensor", p) for p in model._module.parameters())
        sizes.append(sum(tensor.nbytes for tensor in local))
    return sizes


@pytest.mark.ranks
def test_the_estimate_is_what_ranks_hold(folder: Path) -> None:
    of_ranks = spawn(held, 2, folder)
    for layout, *sizes in zip(LAYOUTS, *of_ranks, strict=True):
        estimate = weight_bytes(SHAPE, layout, world_size=2)
        if layout.fsdp:  # a pass gathers a layer, the embedding and the output layer
            assert max(sizes) < estimate < weight_bytes(SHAPE, WHOLE_MODEL, world_size=1) * 1.5
        else:
            assert estimate == max(sizes), layout


def test_only_weights_that_do_not_fit_give_a_warning() -> None:
    assert memory_warning(8e9, 8e9, layout=WHOLE_MODEL) == ""
    line = memory_warning(8e9, 8e9, layout=WHOLE_MODEL, others=1e9)
    assert "keys and values of full sequences 1.0 GB, but the device has 8.0 GB: give" in line
    line = memory_warning(280e9, 64e9, layout=WHOLE_MODEL)
    assert "weights in fp32 need 280.0 GB a rank, but the device has 64.0 GB: set --dtype" in line
    line = memory_warning(140e9, 64e9, layout=InferenceLayout(dtype="bf16"))
    assert "but the device has 64.0 GB: share the model over more ranks with --fsdp" in line


def test_it_comes_before_the_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*_: object, **__: object) -> None:
        raise UserError("the weights are read")

    monkeypatch.setattr("tokamake.inference.model.verify", read)
    peers = Peers(Ranks(0, 1, 0, 1), CPU)
    for available, count in ((1e9, 0), (1e3, 1)):
        monkeypatch.setattr("tokamake.inference.model.device_memory", lambda *_, a=available: a)
        with pytest.raises(UserError, match="the weights are read"):
            InferenceModel(open_any(folder), WHOLE_MODEL, peers=peers)
        assert capsys.readouterr().err.count("warning: weights in fp32 need ") == count


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_keys_and_values_need_what_a_full_cache_holds(folder: Path, dtype: Dtype) -> None:
    alone = Peers(Ranks(0, 1, 0, 1), CPU)
    layout = InferenceLayout(dtype=dtype)
    model = InferenceModel(open_any(folder), layout, peers=alone)
    cache = model.new_cache(2, 9)
    cache.begin([9, 9], 9, device=CPU)
    model.predict(torch.ones(2, 9, dtype=torch.int64), cache)
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors or ()]
    assert sum(tensor.nbytes for tensor in tensors) == cache_bytes(SHAPE, layout, num_tokens=18)


def test_lack_of_memory_is_explained() -> None:
    with (
        pytest.raises(UserError, match=r"rank 0: its device .* can't allocate memory.*smaller"),
        peers(),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(UserError, match="GPU 0 has a total capacity"), peers():
        raise torch.OutOfMemoryError("CUDA out of memory. GPU 0 has a total capacity of 10 GiB")
    with pytest.raises(RuntimeError, match="another"), peers():
        raise RuntimeError("another")
