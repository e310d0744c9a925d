"""The page as a whole: head, navigation, sections, and the script that draws figures."""

from datetime import UTC, datetime
from html import escape
from pathlib import Path

from tokamake import __version__, plugins
from tokamake.errors import UserError
from tokamake.report import html_pages
from tokamake.report.page import figures
from tokamake.report.page.contents import PageContents

_KIND = "report/page/sections"
_NAMES = 5
"""Names of runs in the title, at most."""
_CURVES = 10
"""Curves of a run, about."""
_DAMAGES = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors of a section that meets a file of another version, or one that is deleted meanwhile."""


def assemble(contents: PageContents) -> str:
    """The page as HTML that needs no other file. A section that fails says why."""
    contents.figures.max_points = figures.points_for(_CURVES * len(contents.folders))
    places = {name: plugins.constant(_KIND, name, "PLACE") for name in plugins.names(_KIND)}
    titles, bodies = [], []
    for name in sorted(places, key=places.__getitem__):
        section = plugins.load(_KIND, name)
        try:
            body = section.render(contents)
        except UserError as error:
            body = html_pages.warning(str(error))
        except _DAMAGES as error:
            body = html_pages.warning(f"cannot be shown: {type(error).__name__}: {error}")
        if body:
            titles.append(f'<a href="#{name}">{escape(section.TITLE)}</a>')
            bodies.append(
                f'<section id="{name}" aria-labelledby="title-{name}">\n'
                f'<h2 id="title-{name}">{escape(section.TITLE)}</h2>\n{body}\n</section>'
            )
    return _TEMPLATE.format(
        title=escape(title(contents)),
        style=_file("style.css"),
        faults="".join(map(html_pages.warning, dict.fromkeys(contents.faults))),
        navigation="\n".join(titles),
        sections="\n".join(bodies),
        made=_made(contents),
        bokeh=_bokeh() if contents.figures.is_used else "",
        script=_file("page.js") if contents.figures.is_used else "",
    )


def title(contents: PageContents) -> str:
    """Name of the run, or number of the runs, and their data folder."""
    names = [*contents.folders]
    listed = f": {', '.join(names)}" if len(names) <= _NAMES else ""
    runs = f"{len(names)} runs{listed}" if names else "No run yet"
    runs = f"Run {names[0]}" if len(names) == 1 else runs
    shared = f" on data {contents.data_set}" if contents.data_set not in (None, "default") else ""
    return runs + shared


def _made(contents: PageContents) -> str:
    """Version, and the time of the newest metrics: the same files give the same page."""
    by = f"Made by tokamake {escape(__version__)}"
    paths = [folder / "run.yaml" for folder in contents.folders.values()]
    paths += [folder / "training/metrics.jsonl" for folder in contents.folders.values()]
    times = [path.stat().st_mtime for path in paths if path.is_file()]
    newest = datetime.fromtimestamp(max(times, default=0), UTC)
    return f"{by} from results until {newest:%Y-%m-%d %H:%M} UTC" if times else by


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _bokeh() -> str:
    """Bokeh's script, from the installed package: the page loads nothing."""
    from bokeh.settings import settings

    folder = Path(settings.bokehjs_path())
    return (
        (folder / "js/bokeh.min.js").read_text(encoding="utf-8").replace("</script", "<\\/script")
    )


_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#overview">Skip to the results</a>
<header>
<h1>{title}</h1>
{faults}</header>
<nav aria-label="Sections">
{navigation}
</nav>
<main>
{sections}
</main>
<footer><p>{made}.<span class="screen"> Figures: drag to zoom, or focus one and press + − ← → 0;
click a name to hide a curve.</span></p></footer>
<script>{bokeh}</script>
<script>{script}</script>
</body>
</html>
"""
