"""Each executor is a package of its own, and no file is in two packages."""

import os
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import scikit_build_core.build
import setuptools
from setuptools import build_meta

from tests.support.paths import ROOT

EXECUTORS = sorted(path.name for path in (ROOT / "lib").glob("snakemake_executor_plugin_*"))
IGNORED = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "*.so")


def build(hook: Any, source: Path, *options: Any) -> Path:
    """Call a hook that builds a file of a source tree in the folder above it; return the file."""
    before = Path.cwd()
    # setuptools adds it when it is imported, but a worker of pytest has the path of its controller.
    vendored = str(Path(setuptools.__file__).with_name("_vendor"))
    if vendored not in sys.path:
        sys.path.append(vendored)
    os.chdir(source)
    try:
        return source.parent / hook(str(source.parent), *options)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", EXECUTORS)
def test_sdist_and_wheel_hold_the_modules_of_their_executor(name: str, tmp_path: Path) -> None:
    """As `python -m build` does: the sdist from the folder, and the wheel from the sdist."""
    executor = ROOT / "lib" / name
    modules = {str(path.relative_to(executor)) for path in executor.rglob("*.py")}
    source = shutil.copytree(executor, tmp_path / name, ignore=IGNORED)
    sdist = build(build_meta.build_sdist, source)
    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    packed = {path for path in packed if ".egg-info/" not in path}
    assert packed == modules | {"README.md", "pyproject.toml", "PKG-INFO", "setup.cfg"}

    with zipfile.ZipFile(build(build_meta.build_wheel, unpacked)) as wheel:
        packed = {path for path in wheel.namelist() if ".dist-info/" not in path}
        (metadata,) = (path for path in wheel.namelist() if path.endswith("METADATA"))
        text = wheel.read(metadata).decode()
    assert packed == {f"{name}/{module}" for module in modules}
    assert f"Name: {name.replace('_', '-')}\n" in text
    assert "Requires-Dist: tokamake" not in text


def test_the_wheel_of_tokamake_holds_no_executor(tmp_path: Path) -> None:
    """Built without C++."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "lib", source / "lib", ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheel = build(scikit_build_core.build.build_wheel, source, {"wheel.cmake": "false"})
    with zipfile.ZipFile(wheel) as archive:
        packed = {path for path in archive.namelist() if ".dist-info/" not in path}
    folders = {path.partition("/")[0] for path in packed}
    assert folders == {"tokamake", "snakemake_logger_plugin_tokamake"}
    assert {"tokamake/cli.py", "tokamake/serve/page.html"} <= packed
