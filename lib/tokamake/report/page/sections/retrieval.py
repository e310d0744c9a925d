"""Recall of retrievers beside BM25, and the passages that the first questions found."""

from html import escape
from pathlib import Path
from typing import Any

from tokamake.files import read_sealed_json
from tokamake.report import html_pages
from tokamake.report.page.contents import PageContents

TITLE = "Retrieval"
PLACE = 54

_QUESTIONS = 10
"""Questions of a file that the page shows."""


def render(contents: PageContents) -> str:
    """For each run with searches: a table of recall, and the first questions."""
    parts = []
    for run, folder in contents.folders.items():
        models = _recalls(contents, folder / "retrieval/recall")
        if models:
            data_set = contents.data_sets[run]
            baselines = _recalls(contents, contents.shared(data_set.bm25) / "recall")
            parts.append(f"<h3>{escape(run)}</h3>\n{tables(models, baselines)}")
    return "\n".join(parts)


def _recalls(contents: PageContents, folder: Path) -> dict[str, Any]:
    """Manifests of `evaluate-retrieval`, by the name of the questions."""
    read = {
        path.stem: contents.read_json(path, read_sealed_json)
        for path in sorted(folder.glob("*.json"))
    }
    return {name: result for name, result in read.items() if result}


def tables(models: dict[str, Any], baselines: dict[str, Any]) -> str:
    """Tables of recall, and the first questions with their passages.

    Args:
        models: results of the model by the name of the questions.
        baselines: results of BM25, or none.
    """
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
        parts.append(("", html_pages.folded(title, "\n".join(shown))))
    return html_pages.sections(parts, level=4)


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
    return f'<div class="question">\n{heading}\n' + "\n".join(found) + "\n</div>"
