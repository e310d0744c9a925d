"""The scorer of toxicity in the config: its name, with its options.

A scorer is a file of `detoxify/scorers`, a function FILE.py:FUNCTION, or an entry point of the
group `tokamake.scorers`: a class derived from `TextScorer`, or a function from texts to scores.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from tokamake import plugins
from tokamake.config.external_files import file_hash, import_file
from tokamake.config.fields import Settings
from tokamake.config_files import parse_yaml, validate
from tokamake.errors import UserError

_FOLDER = "detoxify/scorers"
_GROUP = "tokamake.scorers"
ScorerEntry = dict[str, dict[str, Any]]
"""Name of a scorer → its options, in a mapping of one key."""
Score = Callable[[list[str]], Any]
"""Function from texts to their scores."""


def open_scorer(entry: ScorerEntry) -> Any:
    """Return the scorer of an entry of the config: a `TextScorer`, or a function of the user's."""
    ((name, options),) = entry.items()
    loaded = _loaded(name)
    if isinstance(loaded, type):
        return validate(loaded, options, name)
    if options:
        raise UserError(f"{name}: {', '.join(options)}: a function has no options; remove them")
    return loaded


def _loaded(name: str) -> Any:
    """Class or function of a scorer."""
    path, function = _place(name)
    external = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if path.endswith(".py"):
        loaded = getattr(import_file(path, noun="scorers"), function, None)
    elif name in plugins.names(_FOLDER):
        return plugins.load(_FOLDER, name).ToxicityScorer
    elif name in external:
        try:
            loaded = external[name].load()
        except ImportError as error:
            raise UserError(f"{name}: cannot be imported ({error}); install its package") from None
    else:
        known = ", ".join([*plugins.names(_FOLDER), *external])
        raise UserError(f"{name}: unknown scorer; choose one of {known}, or FILE.py:FUNCTION")
    if not callable(loaded):
        raise UserError(f"{path}: has no function {function}; name one: {path}:FUNCTION")
    return loaded


def _place(name: str) -> tuple[str, str]:
    """File and function of FILE.py:FUNCTION; the function is score by default."""
    path, _, function = name.rpartition(":")
    return (path, function) if path.endswith(".py") else (name, "score")


def source_digests(entry: ScorerEntry) -> list[str]:
    """Hashes of the files that scores depend on: source outside the package, and files to read."""
    ((name, _),) = entry.items()
    scorer = open_scorer(entry)
    paths = [*getattr(scorer, "input_files", ())]
    if name not in plugins.names(_FOLDER):
        path, _ = _place(name)
        module = inspect.getmodule(scorer)
        paths.append(Path(path if path.endswith(".py") else getattr(module, "__file__", name)))
    return [file_hash(path) for path in paths]


def check_scorer_packages(entry: ScorerEntry) -> None:
    """Check that the packages of a scorer are installed."""
    ((name, _),) = entry.items()
    packages = getattr(_loaded(name), "packages", ())
    if missing := [package for package in packages if find_spec(package) is None]:
        is_own = name in plugins.names(_FOLDER)
        remedy = "run `pip install 'tokamake[detoxify]'`" if is_own else "install it"
        raise UserError(
            f"{name}: needs {', '.join(missing)}, which this Python environment lacks; {remedy}, "
            "or choose another scorer"
        )


def _entry(value: Any) -> ScorerEntry:
    """Check a scorer: {word_list: {path: words.txt}}, {word_list: words.txt}, or a name alone."""
    value = {value: {}} if isinstance(value, str) else value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"{value!r}: give a scorer as NAME: {{OPTION: VALUE}}")
    ((name, options),) = value.items()
    try:
        if not isinstance(options, Mapping):
            if not (bare := getattr(_loaded(str(name)), "bare_option", "")):
                raise ValueError(f"{name}: {options!r}: give options as {{OPTION: VALUE}}")
            options = {bare: options}
        open_scorer({str(name): dict(options)})
    except UserError as error:
        raise ValueError(str(error).replace("\n", "; ")) from None
    return {str(name): dict(options)}


Scorer = Annotated[
    ScorerEntry, BeforeValidator(_entry, json_schema_input_type=str | dict[str, Any])
]


class _ScorerOption(Settings):
    """The option --scorer of `score-texts`."""

    scorer: Scorer
    """The same as in the config."""


def load_scorer(text: str) -> tuple[str, Score]:
    """Name and function of the option --scorer: a name, or JSON as in the config."""
    value = parse_yaml(text, "--scorer")
    entry = validate(_ScorerOption, {"scorer": value}, "--scorer").scorer
    ((name, _),) = entry.items()
    scorer = open_scorer(entry)
    if callable(scorer):
        return name, scorer
    try:
        scorer.setup()
    except ImportError as error:
        raise UserError(f"{name}: cannot be imported ({error}); install its package") from None
    return name, scorer.score
