"""Stage `search-bm25`: passages that share words with each question, as a baseline."""

from pathlib import Path
from typing import Any

from tokamake.errors import UserError


def search_bm25(
    *,
    questions: Path,
    passages: list[Path],
    output: Path,
    top_k: int = 100,
    k1: float = 0.9,
    b: float = 0.4,
) -> None:
    """Find the passages whose words are most similar to each question, by BM25.

    Words are runs of letters and digits of title and text in lower case. All words count, with
    their endings. The score is Lucene's; the package bm25s computes it. It needs 4 bytes of memory
    for each word of the passages, and 24 for each different word of each passage.

    Args:
        questions: tsv file with rows question<TAB>["answer", "other answer"], or jsonl file.
        passages: tsv files with the header id, text, title, or jsonl files with these keys.
        output: manifest to write, NAME.json; NAME.ids.npy, NAME.scores.npy and NAME.queries.npy
            are beside it, as for `search`.
        top_k: number of passages to find for each question.
        k1: how much a word counts that is repeated in a passage.
        b: how much the length of a passage counts, 0 to 1.
    """
    from tokamake import files
    from tokamake.retrieval.found import KIND, write_found
    from tokamake.retrieval.products import check_name, is_complete
    from tokamake.retrieval.questions import read_questions
    from tokamake.retrieval.word_index import WordIndex

    check_name(output)
    if not (k1 >= 0 and 0 <= b <= 1):
        raise UserError(f"--k1, --b: {k1} and {b}; give k1 of 0 or more, and b from 0 to 1")
    asked = [question.text for question in read_questions(questions)]
    facts: dict[str, Any] = {
        "top_k": top_k,
        "queries": {"made_from": {"questions": files.sha256(questions)}},
        "searched": {"bm25": {"k1": k1, "b": b}, "passages": [*map(_sha256, passages)]},
    }
    facts["request"] = files.digest(facts)
    if is_complete(output, KIND, request=facts["request"]):
        print(f"{output}: already complete")
        return
    index = WordIndex(passages, k1=k1, b=b)
    if not 0 < top_k <= index.num_passages:
        raise UserError(
            f"--top-k: {top_k} for {index.num_passages:,} passages; give 1 or more, at most as "
            "many as there are passages"
        )
    write_found(output, index.find(asked, k=top_k), facts=facts)
    print(f"{output}: {top_k} for each of {len(asked):,} questions")


def _sha256(path: Path) -> str:
    from tokamake import files

    try:
        return files.sha256(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fix the path") from None
