"""Neighbors of the chunks of a text that a model of family retro reads or writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from tokamake.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tokamake.config.architecture import Architecture
    from tokamake.data.tokenizers import Tokenizer
    from tokamake.inference.layout import Peers
    from tokamake.inference.model import InferenceModel

    Numbers = npt.NDArray[np.int64]


@Parameter(name="*")
@dataclass(frozen=True)
class NeighborOptions:
    """Where a model of family retro finds neighbors; other models need none."""

    chunks: Path | None = None
    """Manifest of `index-chunks`. Without it, a model of family retro sees no neighbors."""
    embedder: Path | None = None
    """Model that embedded these chunks."""
    embedder_tokenizer: Path | None = None
    """Tokenizer of that model; by default, the tokenizer beside its weights, or of its run."""
    num_neighbors: int = 2
    """Neighbors of a chunk."""
    retrieved_chunks: int = 2
    """Chunks of a neighbor: itself, and the ones after it in its document."""
    nprobe: int = 0
    """Lists of an IVF index to search; 0: 1, as in FAISS."""
    ef_search: int = 0
    """Candidates in an HNSW graph; 0: 16, as in FAISS."""

    def check(self, architecture: "Architecture") -> None:
        """Refuse options that do not fit a model."""
        if self.chunks is None:
            return
        if not architecture.has_neighbors:
            raise UserError(
                f"--chunks: {self.chunks}: a model of family {architecture.family} has no "
                "neighbors; leave the option out, or name a model of family retro"
            )
        if self.embedder is None:
            raise UserError(
                f"--embedder: missing: name the model that embedded the chunks of {self.chunks}"
            )
        for name in ("num_neighbors", "retrieved_chunks"):
            if (number := getattr(self, name)) < 1:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option}: {number}: too small; give 1 or more")


NO_NEIGHBORS = NeighborOptions()
EVALUATED_CHUNKS = 64
"""Chunks of held-out documents that are embedded at once."""


def retrieve(
    model: "InferenceModel",
    options: NeighborOptions,
    *,
    data_root: Path,
    tokenizer: "Tokenizer",
    peers: "Peers",
    batch_size: int = 1,
) -> None:
    """Let a model of family retro see neighbors from now on; print if it sees none.

    Args:
        data_root: folder that the datasets of the chunks are relative to.
        tokenizer: of the model.
        batch_size: chunks that are embedded at once.
    """
    if not model.architecture.has_neighbors:
        return
    if options.chunks is None:
        peers.ranks.print_once("without neighbors: give --chunks and --embedder to retrieve them")
        return
    retriever = ChunkRetriever(
        options,
        data_root=data_root,
        tokenizer=tokenizer,
        chunk_length=model.architecture.setting("chunk_length"),
        peers=peers,
        batch_size=batch_size,
    )
    model.retrieve_by(retriever)


class ChunkRetriever:
    """Embeds chunks, and finds the most similar chunks of the training split.

    Each rank searches for itself.
    """

    def __init__(
        self,
        options: NeighborOptions,
        *,
        data_root: Path,
        tokenizer: "Tokenizer",
        chunk_length: int,
        peers: "Peers",
        batch_size: int = 1,
    ) -> None:
        """Open the index, the chunks and their embedder, and check that they belong together.

        Args:
            tokenizer: of the model that reads or writes.
            chunk_length: tokens of its chunks.
        """
        from tokamake.inference.layout import Peers
        from tokamake.retrieval.embedding_options import EmbeddingOptions
        from tokamake.retrieval.products import check_not_negative
        from tokamake.retrieval.searched import SearchedIndex
        from tokamake.retrieval.text_vectors import Embedder
        from tokamake.runtime.ranks import ALONE
        from tokamake.train.objectives.retro.chunks import ChunkDatabase

        assert options.chunks is not None
        assert options.embedder is not None
        self._options, self._tokenizer = options, tokenizer
        given = {"nprobe": options.nprobe, "efSearch": options.ef_search}
        check_not_negative({"--nprobe": options.nprobe, "--ef-search": options.ef_search})
        parameters = {name: value for name, value in given.items() if value}
        self._searched = SearchedIndex(options.chunks, parameters=parameters, workers=0)
        self._database = ChunkDatabase(options.chunks, data_root=data_root)
        if self._database.chunk_length != chunk_length:
            raise UserError(
                f"{options.chunks}: chunks of {self._database.chunk_length} tokens, the model has "
                f"chunks of {chunk_length}; give an index of such chunks"
            )
        if options.num_neighbors > self._searched.num_vectors:
            raise UserError(
                f"--num-neighbors: {options.num_neighbors}: more than the "
                f"{self._searched.num_vectors:,} chunks of {options.chunks}; lower it"
            )
        self._embedder = Embedder(
            options.embedder,
            "chunk",
            tokenizer=options.embedder_tokenizer,
            tokenizer_option="--embedder-tokenizer",
            options=EmbeddingOptions(batch_size=batch_size),
            peers=Peers(ALONE, peers.device),
        )
        made_from = self._searched.facts["embeddings"]["made_from"]
        facts = {**self._embedder.facts, "decoded_by": tokenizer.fingerprint}
        names = {"decoded_by": "tokenizer of the datasets", "model": "model"}
        for name, value in facts.items():
            if made_from.get(name) != value:
                raise UserError(
                    f"{options.chunks}: embedded with another {names.get(name, name)} than "
                    f"{options.embedder} and this model have; give the ones of the training"
                )

    def __call__(self, chunks: "Numbers") -> tuple["Numbers", "Numbers"]:
        """Neighbors of chunks (n, m): (n, k, r) tokens, and (n, k) number that are no fill."""
        import numpy as np

        from tokamake.retrieval.chunk_texts import embedded_texts

        number, width = self._options.num_neighbors, self._options.retrieved_chunks
        found = np.full((len(chunks), number), -1)
        numbered = ((row, chunk[chunk != self._tokenizer.eod]) for row, chunk in enumerate(chunks))
        texts = [*embedded_texts(numbered, tokenizer=self._tokenizer, embedder=self._embedder)]
        if texts:
            vectors = self._embedder.vectors_of(texts)
            found[[text.id for text in texts]] = self._searched.find(vectors, k=number)[0]
        tokens, counts = self._database.read(
            found.ravel(), width=width * self._database.chunk_length
        )
        return tokens.reshape(*found.shape, -1), counts.reshape(found.shape)
