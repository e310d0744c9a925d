"""Stage `evaluate-retrieval`: how often an answer is in the passages that a search found."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.config.retrieval import Match
from tokamake.errors import UserError
from tokamake.retrieval.questions import Question

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KIND = "recall of a search"
QUESTIONS = ".questions.jsonl"


def evaluate_retrieval(
    found: Path,
    *,
    questions: Path,
    passages: list[Path],
    output: Path,
    match: Match = "string",
) -> None:
    """Measure recall@k: the share of questions with an answer in the first k passages.

    A passage has an answer if the words of the answer are in it in a row: both decomposed (NFD), in
    lower case, split into runs of letters and digits and single symbols, as in DPR.

    Args:
        found: manifest of `search` or `search-bm25` for these questions.
        questions: tsv file with rows question<TAB>["answer", "other answer"], or jsonl file with
            question and answers.
        passages: tsv files with the header id, text, title, or jsonl files with these keys.
        output: manifest to write, NAME.json, with recall and samples; NAME.questions.jsonl beside
            it has the rank of the first hit of each question.
        match: string, or regex for answers that are regular expressions.
    """
    from tokamake import files
    from tokamake.retrieval.evidence import read_evidence
    from tokamake.retrieval.found import read_found
    from tokamake.retrieval.products import check_name, new_product
    from tokamake.retrieval.questions import read_questions
    from tokamake.retrieval.recall import Hits

    check_name(output)
    asked = read_questions(questions, match=match)
    results, searched = read_found(found)
    sha256 = files.sha256(questions)
    if searched["queries"]["made_from"].get("questions", sha256) != sha256:
        raise UserError(f"{found}: the search had other questions than {questions}; search again")
    if len(asked) != len(results.queries) or set(results.queries) != set(range(len(asked))):
        raise UserError(
            f"{found}: results of {len(results.queries):,} queries, {questions} has "
            f"{len(asked):,} questions; search with the embeddings of these questions"
        )
    rows = [asked[number] for number in results.queries]
    hits = Hits(rows, results, match=match)
    for passage in read_evidence(passages):
        hits.look_at(passage)
    hits.check_all_seen(found)
    recall = hits.recall()
    facts = {
        "num_questions": len(rows),
        "match": match,
        "recall": recall,
        "found": {key: searched[key] for key in ("request", "top_k", "searched")},
        "questions": {"file": questions.name, "sha256": sha256},
        "passages": [{"file": path.name, "bytes": path.stat().st_size} for path in passages],
        "samples": hits.samples(),
    }
    with new_product(output, kind=KIND, suffixes=(QUESTIONS,), facts=facts) as product:
        _write_ranks(product.paths[QUESTIONS], asked, order=results.queries, ranks=hits.ranks)
    shares = ", ".join(f"recall@{k} {share:.1%}" for k, share in recall.items())
    print(f"{output}: {len(rows):,} questions: {shares}")


def _write_ranks(
    path: Path, asked: list[Question], *, order: "npt.NDArray[np.int64]", ranks: list[int]
) -> None:
    """Write a line for each question, in the order of the file of questions."""
    import orjson

    rank_of = dict(zip(order.tolist(), ranks, strict=True))
    with path.open("wb") as file:
        for number, question in enumerate(asked):
            line = {"question": question.text, "answers": question.answers}
            file.write(orjson.dumps({**line, "rank": rank_of[number] or None}) + b"\n")
