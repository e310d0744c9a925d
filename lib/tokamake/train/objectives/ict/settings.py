"""Section `train.ict`."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from tokamake.config.objective import ObjectiveSection


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


class Section(ObjectiveSection):
    """The inverse cloze task: a sentence is the query for the block that it comes from."""

    without_effect: ClassVar[tuple[str, ...]] = ("topk",)

    titles: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]*$")] = "title"
    """Key of the titles: the dataset X_text has its titles in X_title, which `text_key: text,title`
    in the table of corpora makes. Empty: blocks have no titles."""
    text: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")] = "text"
    """Key of the text, which the names of the datasets have."""
    query_in_block_probability: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the samples whose block keeps the query; Megatron's --query-in-block-prob."""
    one_sentence_documents: bool = False
    """Also use documents of one sentence, and blocks of one; Megatron's --use-one-sent-docs."""
    score_scaling: bool = False
    """Divide scores by the square root of the hidden size; Megatron's
    --retriever-score-scaling."""
    topk: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_as_tuple)] = (1, 5)
    """Validations measure how often the block of a query is among this many best ones of its
    batch: a number, or several; empty: they measure the loss alone. Megatron's
    --retriever-report-topk-accuracies."""
