"""Texts that the models continue: the same prompts side by side."""

from html import escape
from typing import Any

from tokamake.report import html_pages
from tokamake.report.page.contents import PageContents

TITLE = "Samples"
PLACE = 70

_STOPPED = {
    "eod": "ended the document",
    "stop": "came to a stop text",
    "max_new_tokens": "reached the maximum length",
    "context": "filled the model's context",
}
_MAX_TEXT = 1_500


def render(contents: PageContents) -> str:
    """Each prompt with its continuations by the runs."""
    by_prompt: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for run, folder in contents.folders.items():
        for each in contents.read_json(folder / "samples.json") or ():
            by_prompt.setdefault(each["prompt"], []).append((run, each))
    several = len({run for drawn in by_prompt.values() for run, _ in drawn}) > 1
    return "\n".join(
        f'<h3>Prompt <q>{escape(prompt)}</q></h3>\n<div class="beside">\n'
        + "\n".join(_continuation(run * several, prompt, drawn=drawn) for run, drawn in continued)
        + "</div>"
        for prompt, continued in by_prompt.items()
    )


def _continuation(title: str, prompt: str, *, drawn: dict[str, Any]) -> str:
    facts = f"{drawn['num_new_tokens']} tokens; {_STOPPED.get(drawn['stopped'], drawn['stopped'])}"
    note = ": ".join(filter(None, [title, facts]))
    return html_pages.sample(prompt, drawn["text"][:_MAX_TEXT], note)
