"""Stage `report`: one page about runs, from the files that exist."""

from pathlib import Path

_RESULTS = Path("results")


def report(*folders: Path, output: Path | None = None, data_set: str | None = None) -> None:
    """Write report.html: a page with figures, tables and texts of runs, that needs no network.

    It works at any time, also while runs train: results that do not exist yet are left out. With
    folders of single runs, it compares them.

    Args:
        folders: results folder, or folders of single runs; by default results.
        output: HTML file to write; by default report.html beside the runs.
        data_set: show the runs of this data folder alone.
    """
    from tokamake.files import write_text
    from tokamake.report.page.assemble import assemble
    from tokamake.report.page.contents import PageContents
    from tokamake.runtime.console import counted
    from tokamake.units import in_bytes

    contents = PageContents(folders or (_RESULTS,), data_set=data_set)
    path = output or contents.results / "report.html"
    page = assemble(contents)
    write_text(path, page)
    runs = counted(len(contents.folders), "run")
    print(f"{path}: {runs}, {in_bytes(len(page.encode()))}; open it in a browser")
