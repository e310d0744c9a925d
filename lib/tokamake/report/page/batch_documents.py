"""Documents of steps with bad numbers, and the command that finds them for any step of a run."""

import shlex
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from tokamake.config.objective import objective_data
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.trace import origins
from tokamake.errors import UserError
from tokamake.report.page.contents import PageContents
from tokamake.train import metrics

_MAX_DOCUMENTS = 1_000
"""Documents of a page; runs and their steps share them."""
_MAX_OF_STEP = 40
_TOKENS, _CHARACTERS = 40, 160
"""Beginning of a document that is shown."""


def render(contents: PageContents) -> str:
    """Tables of the documents of bad steps, folded, and a form for any other step."""
    tables = [table for run in contents.histories for table in _tables(contents, run)]
    runs = [
        run
        for run, settings in contents.settings.items()
        if run in contents.histories and objective_data(settings.train.objective).generates
    ]
    form = _form(contents, runs) if runs else ""
    parts = "\n".join([form, *tables])
    return f'<h3 id="documents">Documents of a step</h3>\n{parts}' if form or tables else ""


def _form(contents: PageContents, runs: list[str]) -> str:
    """Choice of a run and a step; page.js writes the command, also after a click on a curve."""
    options = "".join(
        f'<option value="{escape(shlex.quote(str(contents.folders[run] / "run.yaml")))}" '
        f'data-run="{escape(run)}">{escape(run)}</option>'
        for run in runs
    )
    last = max(int(contents.histories[run]["step"].max()) for run in runs)
    return (
        '<p class="note screen">Click a curve above, or give a step. Steps with bad numbers have '
        "their documents below. Row 0 is the first sample of the batch.</p>\n"
        f'<form class="trace"><label>run <select>{options}</select></label> '
        f'<label>step <input type="number" min="1" max="{last}" value="{max(1, last)}"></label> '
        "<output><code></code></output></form>\n"
    )


def _tables(contents: PageContents, run: str) -> Iterator[str]:
    """A folded table for each bad step; the largest gradient norms, if there are too many."""
    events = [
        event
        for event in metrics.read(contents.folders[run] / "training/events.jsonl")
        if isinstance(event.get("documents"), dict)
    ]
    number = max(1, _MAX_DOCUMENTS // _MAX_OF_STEP // len(contents.histories))
    largest = sorted(events, key=lambda event: -(event.get("grad_norm") or float("inf")))[:number]
    reader = _ShownDocuments(contents, run)
    for event in sorted(largest, key=lambda event: event["step"]):
        rows: list[str] = []
        for prefix, documents in event["documents"].items():
            rows += reader.rows(prefix, documents[: _MAX_OF_STEP - len(rows)])
        total = sum(map(len, event["documents"].values()))
        more = total - len(rows)
        rest = f'<p class="note">{more:,} more are in events.jsonl.</p>' if more > 0 else ""
        shown = "\n".join(rows)
        name = f"{run}, step {event['step']:,}: {total:,} documents"
        yield (
            f'<details class="batch" data-run="{escape(run)}" data-step="{event["step"]}">\n'
            f"<summary>{escape(name)}; {escape(str(event.get('reason', '')))}</summary>\n"
            '<div class="wide"><table>\n<thead><tr><th scope="col">corpus</th>'
            '<th scope="col">file and line</th><th scope="col">beginning of the document</th></tr>'
            f"</thead>\n<tbody>\n{shown}\n</tbody></table></div>{rest}\n</details>"
        )


class _ShownDocuments:
    """Places and beginnings of the documents of a run's datasets."""

    def __init__(self, contents: PageContents, run: str) -> None:
        settings = contents.settings.get(run)
        self._contents = contents
        self._tokenizer_path = settings.tokenizer if settings else None
        self._root = self._found(settings.data_root) if settings else Path()
        known = contents.documents
        self._corpora = dict(zip(known["prefix"], known["corpus"], strict=True))
        self._dataset = cache(IndexedDataset)
        self._decode = cache(self._decoder)

    def rows(self, prefix: str, documents: list[int]) -> list[str]:
        """HTML of the rows of documents of a dataset."""
        try:
            places = origins(self._root / prefix, documents)
        except (UserError, OSError):
            places = [f"document {number:,} of {prefix}" for number in documents]
        corpus = escape(str(self._corpora.get(prefix, Path(prefix).name)))
        return [
            f'<tr><th scope="row">{corpus}</th><td>{escape(place)}</td>'
            f'<td class="text" dir="auto">{escape(self._text(prefix, number))}</td></tr>'
            for place, number in zip(places, documents, strict=True)
        ]

    def _text(self, prefix: str, document: int) -> str:
        try:
            dataset = self._dataset(self._root / prefix)
            first, stop = dataset.document_bounds[document : document + 2]
            tokens: list[int] = []
            for sequence in range(int(first), int(stop)):
                tokens += dataset[sequence][:_TOKENS].tolist()
                if len(tokens) >= _TOKENS:
                    break
            text: str = self._decode()(tokens[:_TOKENS])
        except (UserError, OSError, ValueError) as error:
            return f"({error})"
        return text[:_CHARACTERS]

    def _decoder(self) -> Any:
        from tokamake.data.tokenizers import open_tokenizer

        if self._tokenizer_path is None:
            raise UserError("the run names no tokenizer")
        return open_tokenizer(self._found(self._tokenizer_path)).decode

    def _found(self, path: Path) -> Path:
        """A path of run.yaml, which is relative to the workflow's folder, where it is now."""
        is_inside = not path.exists() and path.parts[:1] == ("results",)
        return self._contents.shared(str(path)) if is_inside else path
