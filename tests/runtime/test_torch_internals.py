"""Private names of torch, each in a small computation. A version that changes one fails by name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import spawn
from tokamake.runtime import torch_internals
from tokamake.runtime.process_group import process_group
from tokamake.runtime.ranks import Ranks

A, B = (torch.tensor([1.0, -2.0, 4.0]), torch.tensor([4.0, 9.0, 16.0]))

FOREACH = {
    "foreach_add_": (A, (B,), {"alpha": -0.5}, A - 0.5 * B),
    "foreach_addcmul_": (A, (A, B, 0.5), {}, A + 0.5 * A * B),
    "foreach_clamp_max_": (A, (1.0,), {}, A.clamp(max=1.0)),
    "foreach_clamp_min_": (A, (1.0,), {}, A.clamp(min=1.0)),
    "foreach_copy_": (A, (B,), {}, B),
    "foreach_div": (A, (B,), {}, A / B),
    "foreach_div_": (A, (B,), {}, A / B),
    "foreach_lerp": (A, (B, 0.25), {}, A.lerp(B, 0.25)),
    "foreach_lerp_": (A, (B, 0.25), {}, A.lerp(B, 0.25)),
    "foreach_mul": (A, (0.5,), {}, A * 0.5),
    "foreach_mul_": (A, (0.5,), {}, A * 0.5),
    "foreach_norm": (A, (), {"dtype": torch.float32}, A.norm()),
    "foreach_sign_": (A, (), {}, A.sign()),
    "foreach_sqrt": (B, (), {}, B.sqrt()),
}
"""Name: tensor, further arguments, options, result; tensors become lists of two."""


@pytest.mark.parametrize("name", FOREACH)
def test_operation_on_lists_of_tensors(name: str) -> None:
    tensor, arguments, options, expected = FOREACH[name]
    tensors = [tensor.clone(), tensor.clone()]
    lists = [[x, x] if isinstance(x, Tensor) else x for x in arguments]
    results = getattr(torch_internals, name)(tensors, *lists, **options)
    for result in tensors if name.endswith("_") else results:
        assert_close(result, expected)


def test_every_operation_on_lists_is_tested() -> None:
    assert set(FOREACH) == {name for name in vars(torch_internals) if name.startswith("foreach_")}


def test_flatten_and_unflatten() -> None:
    tensors = [torch.ones(2, 3), torch.zeros(4)]
    flat = torch_internals.flatten(tensors)
    assert flat.tolist() == [1.0] * 6 + [0.0] * 4
    views = torch_internals.unflatten(flat, tensors)
    assert [tuple(view.shape) for view in views] == [(2, 3), (4,)]


def test_cpu_flash_attention_and_its_backward() -> None:
    q, k, v = (torch.randn(2, 3, 5, 8).requires_grad_() for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    q, k, v = (x.detach() for x in (q, k, v))
    y, lse = torch_internals.cpu_flash_attention(q, k, v, 0.0, True, attn_mask=None)
    assert_close(y, expected.detach())
    assert lse.shape == (2, 3, 5)
    results = torch_internals.cpu_flash_attention_backward(
        torch.ones_like(y), q, k, v, y, lse, 0.0, True, attn_mask=None
    )
    for result, gradient in zip(results, gradients, strict=True):
        assert_close(result, gradient)


CUDA_OPERATORS = {
    "flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
        "is_causal philox_seed philox_offset scale"
    ),
    "efficient_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal scale"
    ),
    "efficient_attention_backward": (
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p "
        "grad_input_mask is_causal scale"
    ),
}


@pytest.mark.parametrize("name", CUDA_OPERATORS)
def test_arguments_of_a_cuda_operator(name: str) -> None:
    schema = getattr(torch_internals, name).default._schema
    assert [argument.name for argument in schema.arguments] == CUDA_OPERATORS[name].split()


class Called(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Any] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators.add(function)
        return function(*args, **(kwargs or {}))


def test_fused_attention_calls_one_of_the_attention_operators() -> None:
    q = torch.randn(1, 2, 4, 8)
    with Called() as called:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert called.operators & {*torch_internals.attention_operators()}


@pytest.mark.parametrize(
    "kind",
    [
        *("flash_attention", "efficient_attention", "cudnn_attention"),
        *("flash_attention_for_cpu", "fused_attention_overrideable"),
    ],
)
def test_each_kind_of_fused_attention_is_an_attention_operator(kind: str) -> None:
    names = {operator._schema.name for operator in torch_internals.attention_operators()}
    assert f"aten::_scaled_dot_product_{kind}" in names


def test_varlen_attention_is_the_operator_of_the_public_function() -> None:
    operator = torch_internals.varlen_attention()
    assert operator is not None
    assert operator.default in torch_internals.attention_operators()


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="needs a torch with MKL: pip install torch on x86"
)
def test_onednn_linear() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    y = torch_internals.onednn_linear(x, weight, bias, "none", [], "")
    assert_close(y, F.linear(x, weight, bias))


@pytest.mark.skipif(
    not hasattr(F, "grouped_mm"), reason="needs a torch with grouped_mm: 2.10 or later"
)
def test_grouped_product() -> None:
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            called.append(function)
            return function(*arguments, **(options or {}))

    ends = torch.tensor([2, 4], dtype=torch.int32)
    with Calls():
        F.grouped_mm(torch.zeros(4, 8), torch.zeros(2, 8, 8), offs=ends)
    assert torch_internals.grouped_product.default in called


class Shape(Tensor):
    """A tensor without data."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:  # type: ignore[override]
        """Refuse all operators."""
        raise RuntimeError(function)


def test_a_wrapper_subclass_has_a_shape_but_no_data() -> None:
    wrapper = torch_internals.wrapper_subclass(Shape, [2**20, 2**20], dtype=torch.bfloat16)
    assert type(wrapper) is Shape
    assert (wrapper.shape, wrapper.dtype) == ((2**20, 2**20), torch.bfloat16)


def shard_of_rank() -> tuple[list[int], list[int]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes, offsets = torch_internals.local_shape_and_offset([5, 4], mesh, placements=[Shard(0)])
    return [*sizes], [*offsets]


@pytest.mark.ranks
def test_local_shape_and_offset_of_a_shard() -> None:
    assert spawn(shard_of_rank, 2) == [([3, 4], [0, 0]), ([2, 4], [3, 0])]


def test_a_mesh_without_groups() -> None:
    with process_group(Ranks(0, 1, 0, 1)):
        before = dist.distributed_c10d._world.group_count
        mesh = torch_internals.mesh_without_groups(
            "cpu", torch.tensor([[0, 1], [2, 3]]), names=("tensor", "shards")
        )
        assert dist.distributed_c10d._world.group_count == before
    assert mesh.mesh_dim_names == ("tensor", "shards")
    assert mesh.shape == (2, 2)
    assert tuple(mesh.get_coordinate() or ()) == (0, 0)


def test_storage_info_of_the_distributed_checkpoint() -> None:
    info = torch_internals.storage_info(file="__0_0.distcp", offset=64, length=128)
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 64, 128)


def test_a_narrowed_tensor_is_a_view_of_a_slice() -> None:
    tensor = torch.zeros(4, 6)
    torch_internals.narrowed(tensor, [1, 2], sizes=[2, 3]).fill_(1.0)
    assert tensor.sum() == tensor[1:3, 2:5].sum() == 6


def timeouts_of_groups() -> list[float]:
    groups = [dist.group.WORLD, dist.new_group([0]), dist.new_group()]
    torch_internals.set_group_timeouts(77)
    own = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    backends = [group._get_backend(torch.device("cpu")) for group in own]
    seconds = [backend.options._timeout.total_seconds() for backend in backends]
    assert [torch_internals.group_timeout(group).total_seconds() for group in own] == seconds
    return seconds


@pytest.mark.ranks
def test_all_groups_of_a_rank_get_a_timeout() -> None:
    assert spawn(timeouts_of_groups, 2) == [[77, 77, 77], [77, 77]]


def test_the_compiler_leaves_a_function_as_it_is() -> None:
    compiled = list[bool]()

    @torch_internals.not_compiled
    def inner(x: torch.Tensor) -> torch.Tensor:
        compiled.append(torch.compiler.is_compiling())
        return x + 1

    outer = torch.compile(lambda x: inner(2 * x) * 3, backend="eager")
    for _ in range(2):
        assert outer(torch.ones(2)).tolist() == [9, 9]
    assert compiled == [False, False]
