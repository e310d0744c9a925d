"""Section `retrieval`: passages and questions on which the biencoders of a config are measured."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tokamake.config.fields import Name, Settings
from tokamake.config.finetune import TaskFiles

Match = Literal["string", "regex"]
"""How an answer matches a passage: by its words, or as a regular expression."""


class FaissSettings(Settings):
    """An index of FAISS, which is searched in place of all vectors."""

    factory: Annotated[str, Field(min_length=1)]
    """String of FAISS's index_factory, such as IVF1024,Flat, HNSW32 or IVF1024,PQ16."""
    train_vectors: Annotated[int, Field(ge=0)] = 0
    """Number of vectors to train on. 0: 256 for each centroid, at most all."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of the sample and of k-means."""
    nprobe: Annotated[int, Field(ge=0)] = 0
    """Lists of an IVF index to search. 0: 1, as in FAISS. More find more, but take longer."""
    ef_search: Annotated[int, Field(ge=0)] = 0
    """Candidates in an HNSW graph. 0: 16, as in FAISS."""


def _with_factory(value: Any) -> Any:
    return {"factory": value} if isinstance(value, str) else value


def _with_name(value: Any) -> Any:
    """Name a single file of questions after itself."""
    return {Path(value).stem: value} if isinstance(value, str) and value else value


class RetrievalSettings(Settings):
    """Search with the biencoders that the runs train: passages and questions are embedded, each
    question finds passages, and recall@k is measured, beside BM25's. The files of each
    setting have the forms of docs/howto/retrieval.md."""

    passages: TaskFiles | None = None
    """Files of passages, or folders or patterns of them; each file is a job, or several ones
    (shard_bytes). Empty: the blocks of the run's datasets are embedded, and indexed if there is an
    index."""
    questions: Annotated[
        dict[Name, Path],
        BeforeValidator(_with_name, json_schema_input_type=str | dict[Name, Path]),
    ] = Field(default_factory=dict)
    """Files of questions with their answers: name → file, or a single file."""
    top_k: Annotated[int, Field(ge=1)] = 100
    """Passages that each question finds. Recall is measured at 1, 5, 20 and 100, up to this."""
    index: Annotated[
        FaissSettings | None,
        BeforeValidator(_with_factory, json_schema_input_type=str | FaissSettings | None),
    ] = None
    """An index of FAISS: its string, or a section with its settings. Empty: each question is
    compared with each passage, which is exact."""
    bm25: bool = True
    """Whether BM25, which compares words, is measured on the same questions."""
    match: Match = "string"
    """How an answer matches a passage: string (by its words), or regex (a regular expression)."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Texts per forward pass of a rank."""
    shard_bytes: Annotated[int, Field(ge=1)] = 1 << 28
    """Bytes of a file of passages that a job embeds, in steps of 4 MiB: a larger file is several
    jobs, whose vectors are the same for any value. Compressed files are not cut."""

    @model_validator(mode="after")
    def _check(self) -> "RetrievalSettings":
        if self.questions and not self.passages:
            raise ValueError("questions: there are no passages to find; set passages")
        if self.passages and not self.questions:
            raise ValueError("passages: there are no questions to find them; set questions")
        return self
