"""The next token is the label of each token, and the model also sees neighbors of earlier chunks.

Shapes: B rows of a micro batch, L tokens of a row, C chunks of a row, k neighbors of a chunk, r
tokens of a neighbor.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.config.objective import objective_section
from tokamake.train.batch import HostBatch
from tokamake.train.objectives.causal.objective import Objective as CausalObjective
from tokamake.train.objectives.retro.samples import retro_record

NEIGHBORS = ("neighbor_tokens", "num_neighbor_tokens")


class Objective(CausalObjective):
    """Rows are records of the loader, see `retro_record`."""

    @property
    def drops(self) -> bool:
        """Also if the encoder of neighbors alone drops numbers."""
        setting = self.run.architecture.setting
        own = setting("encoder_hidden_dropout"), setting("encoder_attention_dropout")
        return super().drops or any(own)

    def collate(self, rows: Any) -> HostBatch:
        """Split tokens into inputs and labels; neighbors are further inputs."""
        batch = super().collate(np.ascontiguousarray(rows["tokens"]))
        neighbors = {name: np.ascontiguousarray(rows[name]) for name in NEIGHBORS}
        return batch._replace(further_inputs={**batch.further_inputs, **neighbors})

    def label_shape(self, rows: Any) -> tuple[int, int]:
        return super().label_shape(rows["tokens"])

    def random_rows(self, generator: np.random.Generator) -> npt.NDArray[Any]:
        """Random tokens, of full neighbors, too."""
        train, section = self.run.train, objective_section(self.run.train)
        record = retro_record(
            train.sequence_length,
            chunk_length=section.chunk_length,
            neighbors=section.neighbors,
            retrieved_chunks=section.retrieved_chunks,
        )
        rows = np.zeros(train.micro_batch_size, record)
        for name in ("tokens", "neighbor_tokens"):
            rows[name] = generator.integers(self._vocab_size, size=rows[name].shape)
        rows["num_neighbor_tokens"] = rows["neighbor_tokens"].shape[-1]
        return rows
