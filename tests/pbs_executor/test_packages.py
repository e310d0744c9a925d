"""Each executor is a package of its own, and no file is in two packages."""

import os
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest
from setuptools import build_meta

from tests.support.paths import ROOT

EXECUTORS = sorted(path.name for path in (ROOT / "lib").glob("snakemake_executor_plugin_*"))


def build(name: str, folder: Path) -> zipfile.ZipFile:
    """Build the wheel of an executor from a copy of its folder, as pip and `build` do."""
    source = shutil.copytree(
        ROOT / "lib" / name, folder / name, ignore=shutil.ignore_patterns("*.egg-info")
    )
    before = Path.cwd()
    os.chdir(source)
    try:
        wheel = build_meta.build_wheel(str(folder))
    finally:
        os.chdir(before)
    return zipfile.ZipFile(folder / wheel)


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_wheel_holds_the_modules_of_its_executor(name: str, tmp_path: Path) -> None:
    with build(name, tmp_path) as wheel:
        packed = {path for path in wheel.namelist() if ".dist-info/" not in path}
        (metadata,) = (path for path in wheel.namelist() if path.endswith("METADATA"))
        text = wheel.read(metadata).decode()
    modules = {f"{name}/{path.name}" for path in (ROOT / "lib" / name).glob("*.py")}
    assert packed == modules
    assert f"Name: {name.replace('_', '-')}\n" in text


def test_the_wheel_of_tokamake_holds_no_executor() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["scikit-build"]["wheel"]["packages"] == ["lib/tokamake"]
