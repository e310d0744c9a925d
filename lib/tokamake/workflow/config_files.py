"""Checks of config files that Snakemake does not make, before it reads them."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tokamake.errors import UserError
from tokamake.validation import parse_yaml


def check_config_files(paths: Iterable[str | Path]) -> None:
    """Check that config files are valid YAML without duplicate keys.

    Snakemake keeps the last of several equal keys, and its message about invalid YAML names neither
    the file nor the line. A file that does not exist is left to Snakemake.
    """
    for path in map(Path, paths):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except UnicodeDecodeError:
            raise UserError(f"{path}: not UTF-8; save the file as UTF-8") from None
        is_json = False
        with suppress(ValueError):  # JSON may be indented with tabs
            json.loads(text)
            is_json = True
        # yte's templates have a syntax of their own.
        if not is_json and "__use_yte__" not in text:
            parse_yaml(text, _shown(path))


def _shown(path: Path) -> str:
    """Path as the user would write it: Snakemake makes those of `--configfile` absolute."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else path)
