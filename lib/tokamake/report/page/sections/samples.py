"""Texts of the models: over training and at its end, the same prompts side by side."""

import re
from html import escape
from typing import Any

import numpy as np
import pandas as pd

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
_MAX_STEPS = 4
"""Steps of a run whose texts stand side by side."""


def render(contents: PageContents) -> str:
    """Each prompt with its continuations: by the steps of a run, and by the runs."""
    over_training = "While the model trained", _over_training(contents.samples)
    return html_pages.sections([over_training, ("After the training", _finished(contents))])


def _over_training(samples: pd.DataFrame) -> str:
    several = samples["run"].nunique() > 1
    parts = []
    for (corpus, prompt), of_prompt in samples.groupby(["corpus", "prompt"], sort=False):
        title = f"Prompt from {corpus}" if corpus else f"Prompt: {prompt}"
        rows = "\n".join(
            f'<div class="beside steps">\n{_at_steps(own, str(run) * several)}</div>'
            for run, own in of_prompt.groupby("run", sort=False)
        )
        parts.append(f"<h4>{escape(title)}</h4>\n{rows}")
    return "\n".join(parts)


def _at_steps(samples: pd.DataFrame, run: str) -> str:
    """The first step, the last one, and some between."""
    places = np.unique(np.linspace(0, len(samples) - 1, _MAX_STEPS).round().astype(int))
    return "\n".join(
        html_pages.sample(
            row.prompt, _shortened(row.text), " ".join(filter(None, [run, f"step {row.step:,}"]))
        )
        for row in samples.iloc[places].itertuples()
    )


def _shortened(text: str) -> str:
    """The beginning of a text; ⋮ stands for two or more empty lines."""
    return re.sub(r"\n\s*\n\s*\n", "\n⋮\n", text[:_MAX_TEXT].rstrip("\n"))


def _finished(contents: PageContents) -> str:
    by_prompt: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for run, folder in contents.folders.items():
        for each in contents.read_json(folder / "samples.json") or ():
            by_prompt.setdefault(each["prompt"], []).append((run, each))
    several = len({run for drawn in by_prompt.values() for run, _ in drawn}) > 1
    return "\n".join(
        f'<h4>Prompt <q>{escape(prompt)}</q></h4>\n<div class="beside">\n'
        + "\n".join(_continuation(run * several, prompt, drawn=drawn) for run, drawn in continued)
        + "</div>"
        for prompt, continued in by_prompt.items()
    )


def _continuation(title: str, prompt: str, *, drawn: dict[str, Any]) -> str:
    facts = f"{drawn['num_new_tokens']} tokens; {_STOPPED.get(drawn['stopped'], drawn['stopped'])}"
    note = ": ".join(filter(None, [title, facts]))
    return html_pages.sample(prompt, _shortened(drawn["text"]), note)
