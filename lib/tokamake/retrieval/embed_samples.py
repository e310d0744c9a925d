"""Stage `embed-samples`: vectors of the chunks of samples, which search for neighbors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.retrieval.embedding_options import ChunkEmbedding

if TYPE_CHECKING:
    from tokamake.data.tokenizers import Tokenizer


def embed_samples(
    index: Path,
    /,
    *,
    data_root: Path,
    split: str,
    dataset: str,
    embedding: ChunkEmbedding,
    output: Path,
) -> None:
    """Embed the chunks of a split's samples from a dataset, as `embed-chunks` does.

    Ids are place × chunks of a sample + chunk, where the place of a sample counts the ones drawn
    from the dataset before. Ends of documents in a chunk are left out of its text.

    Args:
        index: folder of `index`, with samples of objective retro.
        data_root: folder that the prefixes in the index are relative to.
        split: train, valid or another split of the index.
        dataset: name of the dataset, its prefix without folders.
        embedding: the model that embeds chunks.
        output: manifest to write, NAME.json; NAME.npy and NAME.ids.npy are beside it.
    """
    from tokamake.data.indexed.manifest import check_tokenizer
    from tokamake.retrieval.chunk_texts import write_vectors
    from tokamake.train.objectives.retro.samples import ChunkedSamples

    def all_chunks(tokenizer: "Tokenizer") -> tuple[Any, dict[str, Any]]:
        samples = ChunkedSamples(index, split=split, data_root=data_root)
        number = samples.number(dataset)
        if number is None:
            return (), {"samples": ""}
        check_tokenizer(samples.prefixes[number], tokenizer)
        chunks = samples.chunks(number, eod=tokenizer.eod)
        return chunks, {"samples": samples.samples_digest(number)}

    write_vectors(all_chunks, embedding, output=output)
