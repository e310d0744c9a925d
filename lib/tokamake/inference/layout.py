"""How the ranks of an inference command share the model; start and end of such a command."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tokamake.config.parallel import ParallelSettings
from tokamake.errors import UserError
from tokamake.runtime.ranks import Ranks

if TYPE_CHECKING:
    import torch

    from tokamake.config.architecture import Architecture

Dtype = Literal["fp32", "bf16", "fp16"]


@Parameter(name="*")
@dataclass(frozen=True)
class InferenceLayout:
    """How ranks share a model. All ranks that the sizes here do not use are data-parallel."""

    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Ranks among which the layers are divided."""
    fsdp: Annotated[bool, Parameter(negative="")] = False
    """Whether data-parallel ranks share the weights (FSDP); otherwise each holds them all."""
    dtype: Dtype = "fp32"
    """Dtype of weights and computation. Losses and probabilities are computed in fp32."""

    def check(self, architecture: "Architecture", *, world_size: int) -> None:
        """Check that the ranks can share a model in this layout."""
        if not architecture.is_causal:
            kind = "an encoder-decoder" if architecture.has_decoder else "an encoder"
            kind = "a biencoder" if architecture.has_towers else kind
            raise UserError(
                f"the checkpoint is of family {architecture.family}, {kind}, which cannot "
                "continue text; give a checkpoint of another family"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(self, name)) < 1:
                raise UserError(f"{name}: {size}: too small; give 1 or more")
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        if world_size % (tensor * pipeline):
            raise UserError(
                f"tensor {tensor} × pipeline {pipeline} needs {tensor * pipeline} ranks or a "
                f"multiple, and there {'is' if world_size == 1 else 'are'} {world_size}; start as "
                "many with torchrun, mpiexec or srun, or change --tensor-parallel-size and "
                "--pipeline-parallel-size"
            )
        try:
            self.settings.check_architecture(architecture, sequence_length=1)
        except UserError as error:  # it names settings of a training
            raise UserError(str(error).removeprefix("train.parallel.")) from None

    def describe(self, world_size: int) -> str:
        """The layout in words, e.g. 8 ranks = data 2 × tensor 4, sharded, bf16."""
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        sizes = {"data": world_size // (tensor * pipeline), "tensor": tensor, "pipeline": pipeline}
        product = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        return f"{world_size} ranks = {product}{', sharded' * self.fsdp}, {self.dtype}"

    @property
    def settings(self) -> ParallelSettings:
        """The sizes as settings of a training."""
        return ParallelSettings(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
        )


WHOLE_MODEL = InferenceLayout()
"""Each rank has the whole model in fp32."""


class Peers:
    """The ranks of an inference command."""

    def __init__(self, ranks: Ranks, device: "torch.device") -> None:
        self.ranks, self.device = ranks, device

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes results."""
        return self.ranks.rank == 0

    def together(self) -> Any:
        """Context in which an error of one rank is raised on all."""
        from tokamake.runtime.rank_errors import raise_on_all_ranks

        return raise_on_all_ranks() if self.ranks.world_size > 1 else nullcontext()


@contextmanager
def peers() -> Iterator[Peers]:
    """Join the other ranks of this command, if a launcher started several; leave them on exit.

    A host whose device reports that it is broken is noted for the next job.
    """
    from tokamake.runtime.device import noted_device_faults
    from tokamake.runtime.process_group import choose_device, joined
    from tokamake.runtime.rank_errors import leave

    ranks = Ranks.find()
    if ranks.world_size == 1:
        with noted_device_faults(ranks), _explained_lack_of_memory(ranks):
            yield Peers(ranks, choose_device(ranks))
        return
    with joined(ranks) as device, _explained_lack_of_memory(ranks):
        yield Peers(ranks, device)
    leave(ranks, 0)


@contextmanager
def _explained_lack_of_memory(ranks: Ranks) -> Iterator[None]:
    from tokamake.runtime.device import is_out_of_memory

    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        message = (
            f"rank {ranks.rank}: its device has too little memory ({reason}): give a smaller "
            "--batch-size, --dtype bf16, or more ranks that share the model"
        )
        if ranks.rank:  # only rank 0 reports its errors
            print(f"tokamake: {message}", file=sys.stderr, flush=True)
        raise UserError(message) from None
