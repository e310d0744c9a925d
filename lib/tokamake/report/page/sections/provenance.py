"""Provenance: settings, versions, environment, hashes, and the commands that made each file."""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from tokamake.errors import UserError
from tokamake.files import read_json
from tokamake.report import html_pages
from tokamake.report.page.contents import PageContents
from tokamake.runtime.console import counted

TITLE = "Provenance"
PLACE = 90

_MAX_FILES = 12
"""Files of a rule that are listed."""


def render(contents: PageContents) -> str:
    """Facts of each run, folded except for the first lines, then hashes and commands."""
    runs = "\n".join(_run(contents, run) for run in contents.folders)
    parts = [("", runs), ("Hashes", _hashes(contents)), ("Commands", _commands(contents))]
    return html_pages.sections(parts)


def _run(contents: PageContents, run: str) -> str:
    folder = contents.folders[run]
    environment = contents.read(run, "environment.json") or {}
    trained = contents.read(run, "train.json") or {}
    code = environment.get("tokamake") or {}
    is_own = code.get("commit") in (None, environment.get("commit"))
    versions = [f"{name} {number}" for name, number in trained.get("versions", {}).items()]
    facts = {
        "commit": _commit(environment) or "not known" * is_own,
        "commit of tokamake": "" if is_own else _commit(code),
        "versions": ", ".join(versions),
        "modules": ", ".join(environment.get("modules") or []),
        "Python": str(environment.get("python") or ""),
        "digest of the run": str(trained.get("digest") or ""),
    }
    folded = [html_pages.folded("Settings: run.yaml", _text(folder / "run.yaml"))]
    for title, key in (("Packages", "packages"), ("Variables of the environment", "variables")):
        if values := environment.get(key):
            table = html_pages.definitions([(name, str(value)) for name, value in values.items()])
            folded.append(html_pages.folded(f"{title}: {len(values):,}", table))
    shown = html_pages.definitions([item for item in facts.items() if item[1]])
    title = f"<h3>Run {escape(run)}</h3>\n" if len(contents.folders) > 1 else ""
    return title + shown + "\n" + "\n".join(folded)


def _commit(checkout: dict[str, Any]) -> str:
    changed = checkout.get("changed_files") or []
    edited = f", with changes in {', '.join(changed[:5])}" if changed else ""
    return f"{checkout['commit']}{edited}" if checkout.get("commit") else ""


def _text(path: Path) -> str:
    return f'<pre tabindex="0">{escape(path.read_text(encoding="utf-8", errors="replace"))}</pre>'


def _hashes(contents: PageContents) -> str:
    """SHA-256 of the tokens of each dataset, of the tokenizer and of the raw files, folded."""
    rows: list[list[str]] = []
    for data_set in {each.name: each for each in contents.data_sets.values()}.values():
        described = contents.read_json(contents.shared(data_set.metadata))
        rows += [row for each in described or () for row in _hash_rows(each)]
    if not rows:
        return ""
    table = html_pages.table(["file", "SHA-256"], [*map(list, dict.fromkeys(map(tuple, rows)))])
    return html_pages.folded(f"Datasets and raw files: {len(rows):,} hashes", table)


def _hash_rows(dataset: dict[str, Any]) -> Iterator[list[str]]:
    for kind, value in (dataset.get("sha256") or {}).items():
        yield [f"{dataset['data_prefix']}.{kind}", str(value)]
    if dataset.get("tokenizer"):
        yield ["tokenizer", str(dataset["tokenizer"])]
    for source in (dataset.get("sources") or ())[:_MAX_FILES]:
        for raw in source.get("inputs", ())[:_MAX_FILES]:
            if raw.get("sha256"):
                yield [str(raw.get("path")), str(raw["sha256"])]


def _commands(contents: PageContents) -> str:
    """Command of each file, by rule, as the workflow recorded it beside the file."""
    by_rule: dict[str, dict[str, list[str]]] = {}
    folders = [*contents.folders.values(), contents.results / "data", contents.results / "raw"]
    for root in [*(folder / ".made_from" for folder in folders), contents.results / ".made_from"]:
        for path in sorted(root.rglob("*.json")):
            try:
                record = read_json(path, "")
                rule, command = record["rule"], record["shellcmd"]
            except (UserError, KeyError, TypeError):
                continue
            name = root.parent / path.relative_to(root).with_suffix("")
            by_rule.setdefault(rule, {}).setdefault(str(command), []).append(str(name))
    return "\n".join(
        html_pages.folded(
            f"{rule}: {counted(sum(map(len, commands.values())), 'file')}", _rule(commands)
        )
        for rule, commands in by_rule.items()
    )


def _rule(commands: dict[str, list[str]]) -> str:
    shown = [*commands.items()][:_MAX_FILES]
    texts = [
        f'<pre tabindex="0"># {escape(", ".join(files[:_MAX_FILES]))}\n{escape(command)}</pre>'
        for command, files in shown
    ]
    if rest := len(commands) - len(shown):
        texts.append(f"<p>{rest:,} more commands are in the folders .made_from.</p>")
    return "\n".join(texts)
