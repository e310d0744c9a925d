"""Versions of other packages that tokamake supports."""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def required(package: str) -> SpecifierSet:
    """Versions of a package that tokamake supports; any, if tokamake does not name it."""
    requirements = map(Requirement, metadata.requires("tokamake") or [])
    return next((r.specifier for r in requirements if r.name == package), SpecifierSet())
