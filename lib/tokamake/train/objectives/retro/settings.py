"""Section `train.retro`."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from tokamake.config.objective import ObjectiveSection


class Section(ObjectiveSection):
    """Retro (arXiv 2112.04426): each chunk of a sample has neighbors, similar chunks of other
    documents of the training split."""

    without_effect: ClassVar[tuple[str, ...]] = ("batch_size",)

    embedder: Path | None = None
    """Model whose vectors decide which chunks are similar, in any format: a BERT, or a biencoder,
    whose tower of blocks counts. A BERT gives the mean of the last states between [CLS] and [SEP].
    """
    embedder_tokenizer: Path | None = None
    """Tokenizer of that model. Empty: the tokenizer beside its weights, or of the run that trained
    it."""
    chunk_length: Annotated[int, Field(ge=1)] = 64
    """Tokens of a chunk; Megatron's --retro-gpt-chunk-length. `sequence_length` is a multiple."""
    neighbors: Annotated[int, Field(ge=1)] = 2
    """Neighbors of a chunk that the model sees; Megatron's --retro-num-neighbors."""
    retrieved_chunks: Annotated[int, Field(ge=1)] = 2
    """Chunks of a neighbor: itself, and the ones after it in its document; Megatron's
    --retro-num-retrieved-chunks."""
    num_found: Annotated[int, Field(ge=1)] = 200
    """Chunks that a search finds; Megatron's --retro-query-num-neighbors-query. Chunks of the
    sample's own documents are dropped."""
    num_kept: Annotated[int, Field(ge=1)] = 20
    """The most similar chunks that are kept of these; Megatron's
    --retro-query-num-neighbors-save."""
    factory: str = "Flat"
    """Index of FAISS, by its string; Megatron's --retro-index-str. Flat is exact."""
    train_vectors: Annotated[int, Field(ge=0)] = 0
    """Random chunks to train the index on; 0: 256 for each centroid."""
    nprobe: Annotated[int, Field(ge=0)] = 0
    """Lists of an IVF index to search; Megatron's --retro-query-nprobe. 0: 1, as in FAISS."""
    ef_search: Annotated[int, Field(ge=0)] = 0
    """Candidates in an HNSW graph; Megatron's --retro-query-ef-search. 0: 16, as in FAISS."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Chunks that a rank embeds at once."""
