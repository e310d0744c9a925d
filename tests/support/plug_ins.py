"""New plug-ins beside the files of tokamake, without changing the package."""

from importlib import import_module
from pathlib import Path

import pytest

from tokamake import plugins


def add(root: Path, monkeypatch: pytest.MonkeyPatch, new: dict[str, str | Path]) -> None:
    """Add plug-ins to tokamake for a test: `root` becomes the library, with links to its files.

    `new` has paths in the package, such as `optim/signs.py`: a text, or a file or folder to link.
    """
    library = plugins._ROOT
    root.mkdir()
    kinds = {path.partition("/")[0] for path in new}
    for entry in library.iterdir():
        if entry.name in kinds:
            (root / entry.name).mkdir()
            for file in entry.iterdir():
                (root / entry.name / file.name).symlink_to(file)
        else:
            (root / entry.name).symlink_to(entry)
    for path, content in new.items():
        if isinstance(content, Path):
            (root / path).symlink_to(content)
        else:
            (root / path).write_text(content)
    for kind in kinds:
        package = import_module(f"tokamake.{kind}")
        monkeypatch.setattr(package, "__path__", [str(root / kind), *package.__path__])
    monkeypatch.setattr(plugins, "_ROOT", root)
