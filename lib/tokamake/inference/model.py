"""One rank's part of a model that predicts tokens, and its messages to other ranks.

Tensor-parallel ranks share each layer, pipeline ranks the layers, and data-parallel ranks the
sequences, with FSDP also the weights. Each rank reads only its part of a checkpoint.
Shape suffixes: B sequences, L tokens, N predicted tokens, D hidden size, V vocabulary.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokamake import plugins
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.load_model import verify
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.checkpoint.tensors.chunks import OpenFiles, read_tensor
from tokamake.inference.layout import InferenceLayout, Peers
from tokamake.inference.memory import DTYPES, Needs, memory_warning, weight_bytes
from tokamake.models.common.key_value_cache import KeyValueCache
from tokamake.parallel import mesh, sharding
from tokamake.parallel.loss import over_vocabulary, token_losses
from tokamake.parallel.placement import placements
from tokamake.runtime.console import counted
from tokamake.runtime.device import device_memory

_NO_NEEDS = Needs()


class InferenceModel:
    """One rank's part of a model; without peers, the whole model.

    All ranks call the methods together, with the same arguments, unless they say otherwise.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: InferenceLayout,
        *,
        peers: Peers,
        needs: Needs = _NO_NEEDS,
    ) -> None:
        if further := checkpoint.architecture.num_mtp_layers:
            ignored = f"{counted(further, 'MTP layer')} ignored: for training alone"
            peers.ranks.print_once(f"{checkpoint.path}: {ignored}")
        self.architecture = checkpoint.architecture.without_mtp
        self.device, self._peers = peers.device, peers
        self.mesh = mesh.SINGLE_RANK
        if peers.ranks.world_size > 1:
            peers.ranks.print_once(layout.describe(peers.ranks.world_size))
            self.mesh = mesh.build(
                layout.settings, peers.ranks.world_size, device=peers.device, shard=layout.fsdp
            )
        self._dtype = DTYPES[layout.dtype]
        self.is_sharded = layout.fsdp and self.mesh.data.size > 1
        self._sent: tuple[Tensor, Any] | None = None
        if peers.is_first:
            self._check_memory(layout, needs)
        with peers.together():
            verify(checkpoint, rank=peers.ranks.rank, world_size=peers.ranks.world_size)
        with peers.together():
            self._module = self._load(checkpoint, layout)

    def _check_memory(self, layout: InferenceLayout, needs: Needs) -> None:
        """Say that the model does not fit, before it is read."""
        ranks = self._peers.ranks
        needed = weight_bytes(self.architecture, layout, world_size=ranks.world_size)
        available = device_memory(self.device, ranks)
        others = needs.beside_weights(self.architecture, layout)
        if warning := memory_warning(needed, available, layout=layout, others=others):
            print(warning, file=sys.stderr, flush=True)

    def _load(self, checkpoint: Checkpoint, layout: InferenceLayout) -> Any:
        family = plugins.load("models/*/model", self.architecture.family)
        layers = layout.settings.layers_of_stages(self.architecture.num_hidden_layers)
        with torch.device("meta"):
            module = family.Model(
                self.architecture, self.mesh, stage=layers[self.mesh.pipeline.rank]
            )
        placed, saved_names = placements(module), module.saved_names()
        module.to(self._dtype)
        if self.is_sharded:
            from torch.distributed.fsdp import MixedPrecisionPolicy  # the import takes long

            sharding.shard(
                module,
                module.layers.values(),
                self.mesh,
                policy=MixedPrecisionPolicy(),
                reshard_after_forward=True,
            )
        module.to_empty(device=self.device)
        chunks = sharding.parameter_chunks(
            module,
            placed,
            mesh=self.mesh,
            shapes=model_tensors.shapes(self.architecture),
            saved_names=saved_names,
            tied_output=module.tied_output,
        )
        chunks += sharding.buffer_chunks(module, tensor_name=family.Model.tensor_name)
        with OpenFiles() as files, torch.no_grad():
            for chunk in chunks:
                key = f"model.{chunk.saved_name}"
                chunk.local.copy_(
                    read_tensor(checkpoint.source, key, slices=chunk.place, files=files)
                )
        if not self.is_sharded:
            module.join_projections()
        return module.eval().requires_grad_(False)

    def retrieve_by(self, retriever: Any) -> None:
        """Let a model of family retro see the neighbors that a retriever finds, from now on."""
        self._module.retriever = retriever

    @property
    def is_first(self) -> bool:
        """Whether this rank gets logits and chooses tokens."""
        return self._peers.is_first

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return sum(parameter.nbytes for parameter in self._module.parameters())

    def new_cache(self, num_rows: int, capacity: int, *, is_kept: bool = True) -> KeyValueCache:
        """Empty cache for this rank's layers; see `KeyValueCache` for the arguments."""
        cache: KeyValueCache = self._module.new_cache(num_rows, capacity, is_kept=is_kept)
        return cache

    # ---- Passes ----

    @torch.no_grad()
    def total_loss(self, inputs_BL: Tensor, labels_BL: Tensor) -> Tensor | None:
        """Sum of the losses of a batch in nats, fp64; None on ranks that do not compute it.

        Data-parallel ranks may give different batches; one rank of each data-parallel rank has the
        loss of its batch.
        """
        logits = self._forward(inputs_BL)
        if logits is None:
            return None
        size = self.architecture.vocab_size or 0
        losses = token_losses(logits, labels_BL, mesh=self.mesh, size=size)
        # A sum of many fp32 losses in fp32 loses digits.
        return losses.double().sum() if self.mesh.tensor.rank == 0 else None

    @torch.no_grad()
    def predict(self, tokens_BL: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Logits (N, V) in fp32 of the tokens that follow; None on ranks without the last layer.

        The tensor-parallel ranks of the last pipeline stage all have them. A pass must have begun
        in the cache; this ends it.
        """
        logits = self._forward(tokens_BL, cache)
        cache.end()
        axis = self.mesh.tensor
        if logits is not None:
            size = self.architecture.vocab_size or 0
            logits = over_vocabulary(logits.float(), axis, size=size)
        return logits

    def _forward(self, tokens_BL: Tensor, cache: KeyValueCache | None = None) -> Tensor | None:
        """Logits, on ranks of the last stage; None on other ranks."""
        x = self._receive(tokens_BL)
        y: Tensor = self._module(x, cache)
        if self._module.is_last:
            return y
        # Sent while this rank goes on with the next batch; the buffer must live until then.
        self._wait()
        y = y.contiguous()
        self._sent = y, dist.isend(y, self._peer(1), group=self.mesh.pipeline.group)
        return None

    def _receive(self, tokens_BL: Tensor) -> Tensor:
        if self._module.is_first:
            return tokens_BL
        shape = (*tokens_BL.shape, self.architecture.hidden_size)
        x_BLD = torch.empty(shape, dtype=self._dtype, device=self.device)
        dist.recv(x_BLD, self._peer(-1), group=self.mesh.pipeline.group)
        return x_BLD

    def at_first(self, values: Tensor | None, shape: Sequence[int]) -> Tensor | None:
        """Bring fp32 values from the last pipeline stage to its first one; None on other ranks."""
        self._wait()
        axis = self.mesh.pipeline
        if axis.size > 1 and self.mesh.tensor.rank == 0:
            if self._module.is_first:
                values = torch.empty(tuple(shape), device=self.device)
                dist.recv(values, self._peer(-1), group=axis.group)
            elif values is not None:
                dist.send(values.contiguous(), self._peer(1), group=axis.group)
        return values if self._module.is_first and self.mesh.tensor.rank == 0 else None

    def _peer(self, distance: int) -> int:
        """Global rank of the pipeline rank at a distance; the first one follows the last."""
        axis = self.mesh.pipeline
        assert axis.group is not None
        return dist.get_global_rank(axis.group, (axis.rank + distance) % axis.size)

    def _wait(self) -> None:
        if self._sent:
            self._sent[1].wait()
            self._sent = None

    # ---- Agreement ----

    def add_up(self, values: Tensor) -> Tensor:
        """Sum of a tensor over all ranks."""
        self._wait()
        if self._peers.ranks.world_size > 1:
            dist.all_reduce(values)
        return values
