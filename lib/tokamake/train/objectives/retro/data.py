"""Settings and data of the objective retro: samples of documents, with neighbors of chunks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from tokamake.config.objective import objective_section
from tokamake.config.train_fields import TrainFields
from tokamake.errors import UserError
from tokamake.train.objectives.causal.data import Data as CausalData


class Data(CausalData):
    """Samples of the objective causal, and the neighbors of each of their chunks."""

    name, stacks = "retro", "retro"
    continues_prompts = False  # neighbors of the prompt are not known

    def check_settings(self, train: TrainFields) -> None:
        """Also refuse samples that are no whole chunks, and too few neighbors to choose from."""
        super().check_settings(train)
        section = objective_section(train)
        if train.sequence_length % section.chunk_length:
            raise ValueError(
                f"sequence_length: {train.sequence_length}: not a multiple of retro.chunk_length "
                f"{section.chunk_length}; make it "
                f"{-(-train.sequence_length // section.chunk_length) * section.chunk_length}"
            )
        names = ("neighbors", "num_kept", "num_found")
        for lower, upper in pairwise(names):
            if getattr(section, lower) > getattr(section, upper):
                raise ValueError(
                    f"retro.{lower}: {getattr(section, lower)}: more than retro.{upper} "
                    f"{getattr(section, upper)}; change one of them"
                )
        if train.fim.rate:
            raise ValueError(
                f"fim.rate: {train.fim.rate:g}: objective retro has neighbors for samples as they "
                "are; remove it"
            )

    def check_model(self, train: TrainFields, architecture: Any) -> None:
        """Refuse a model with other chunks."""
        length, chunks = architecture.setting("chunk_length"), objective_section(train).chunk_length
        if length != chunks:
            raise UserError(
                f"train.retro.chunk_length: {chunks}: the model has chunks of {length} tokens "
                "(chunk_length of its architecture); change one of them"
            )

    def stack_lengths(self, train: TrainFields) -> list[int]:
        """The decoder's first; each neighbor of a sample is a row of the encoder."""
        section, length = objective_section(train), train.sequence_length
        num_neighbors = length // section.chunk_length * section.neighbors
        return [length, *[section.retrieved_chunks * section.chunk_length] * num_neighbors]

    def sample_settings(self, train: TrainFields) -> dict[str, Any]:
        """Settings that decide which neighbors a sample has."""
        section = objective_section(train)
        keys = ("chunk_length", "neighbors", "retrieved_chunks")
        return {"name": self.name, **{key: getattr(section, key) for key in keys}}

    def further_data(self, folder: Path, index: dict[str, Any]) -> dict[str, Any]:
        from tokamake.train.objectives.retro.samples import neighbor_hashes

        return {"neighbors": neighbor_hashes(folder, index)}

    def open_samples(self, folder: Path, **options: Any) -> Any:
        from tokamake.train.objectives.retro.samples import RetroSamples

        return RetroSamples(folder, **options)
