"""Stage `plot-retrieval`: recall of a model beside BM25, and what questions found, as a page."""

from pathlib import Path
from typing import Any

_QUESTIONS = 10
"""Questions of a file that the page shows."""


def plot_retrieval(recall: list[Path], /, *, bm25: tuple[Path, ...] = (), output: Path) -> None:
    """Write retrieval.html: recall at each k, and the first questions with what they found.

    Args:
        recall: manifests of `evaluate-retrieval` for the searches of a model, one for each file of
            questions, NAME.json.
        bm25: manifests for the searches of `search-bm25`, with the same names.
        output: HTML file to write.
    """
    from tokamake.files import read_sealed_json, write_text

    remedy = "make it with `tokamake evaluate-retrieval`"
    models = {path.stem: read_sealed_json(path, remedy) for path in recall}
    baselines = {path.stem: read_sealed_json(path, remedy) for path in bm25}
    write_text(output, page(models, baselines))
    print(f"{output}: recall on {len(models)} files of questions")


def page(models: dict[str, Any], baselines: dict[str, Any]) -> str:
    """Tables of recall and samples, as an HTML page.

    Args:
        models: results of the model by the name of the questions.
        baselines: results of BM25, or none.
    """
    from html import escape

    from tokamake.report import html_pages

    ks = list(dict.fromkeys(k for result in models.values() for k in result["recall"]))
    rows = [
        [
            searcher if len(models) == 1 else f"{name}: {searcher}",
            *(html_pages.cell(result["recall"].get(k), ".1%") for k in ks),
        ]
        for name, model in models.items()
        for searcher, result in (("this model", model), ("BM25", baselines.get(name)))
        if result
    ]
    table = html_pages.table(["search by", *(f"recall@{k}" for k in ks)], rows)
    numbers = [
        f"{result['num_questions']:,} questions in {name}" for name, result in models.items()
    ]
    note = f"{', '.join(numbers)}. {_searched(next(iter(models.values())))}"
    note = f'<p class="note">{escape(note)}</p>'
    parts = [("", table + note)]
    for name, model in models.items():
        baseline = baselines.get(name, {"samples": []})
        shown = [
            _question(sample, baseline["samples"][number : number + 1])
            for number, sample in enumerate(model["samples"][:_QUESTIONS])
        ]
        title = "What the first questions found" + f": {name}" * (len(models) > 1)
        parts.append((title, "\n".join(shown)))
    return html_pages.page("Retrieval", html_pages.sections(parts))


def _searched(result: dict[str, Any]) -> str:
    """How the passages were searched, in a sentence."""
    index = result["found"]["searched"].get("index")
    if index is None:
        return "Each question was compared with each passage (exact search)."
    parameters = {"nprobe": "lists searched", "efSearch": "candidates in the graph"}
    given = [f"{text} {index[name]}" for name, text in parameters.items() if name in index]
    return f"The passages were searched with an index: {', '.join([index['factory'], *given])}."


def _question(sample: dict[str, Any], baseline: list[dict[str, Any]]) -> str:
    """A question, its answers, and the best passages that it found."""
    from tokamake.report import html_pages

    ranks = [("this model", sample["rank"]), *(("BM25", each["rank"]) for each in baseline)]
    first = ", ".join(f"{name}: {rank or 'not found'}" for name, rank in ranks)
    answers = "; ".join(sample["answers"][:5])
    found = [
        html_pages.found(
            f"{rank}. {passage['title'] or passage['id']}",
            passage["text"],
            marked=passage["answer"] if passage["hit"] else None,
            note=f"score {passage['score']:.2f}" + ", has an answer" * passage["hit"],
        )
        for rank, passage in enumerate(sample["found"], 1)
    ]
    heading = html_pages.definitions(
        [("question", sample["question"]), ("answers", answers), ("rank of first hit", first)]
    )
    return f'<section class="question">\n{heading}\n' + "\n".join(found) + "\n</section>"
