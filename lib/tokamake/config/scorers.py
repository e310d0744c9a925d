"""The scorer of toxicity in the config: its name, with its options.

A scorer is a file of `detoxify/scorers`, a function FILE.py:FUNCTION, or an entry point of the
group `tokamake.scorers`: a class derived from `TextScorer`, or a function from texts to scores.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from tokamake.config.external_plugins import PlugInKind, file_hash
from tokamake.config.fields import Settings
from tokamake.config_files import parse_yaml, validate
from tokamake.errors import UserError

_KIND = PlugInKind("scorer", "detoxify/scorers", extra="detoxify", external="FILE.py:FUNCTION")
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
    module = _KIND.load(path)
    loaded = getattr(module, function if path.endswith(".py") else "ToxicityScorer", module)
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
    source = _KIND.source(_place(name)[0], _loaded(name))
    paths = [*getattr(open_scorer(entry), "input_files", ()), *source]
    return [file_hash(path) for path in paths]


def check_scorer_packages(entry: ScorerEntry) -> None:
    """Check that the packages of a scorer are installed."""
    ((name, _),) = entry.items()
    if fault := _KIND.missing_packages(name, _loaded(name)):
        raise UserError(f"{fault}, or choose another scorer")


def _checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    open_scorer({name: options})
    return options


def _entry(value: Any) -> ScorerEntry:
    """Check a scorer: {word_list: {path: words.txt}}, {word_list: words.txt}, or a name alone."""
    return _KIND.check_entry(value, find=_loaded, check=_checked)


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
    check_scorer_packages(entry)
    scorer = open_scorer(entry)
    if callable(scorer):
        return name, scorer
    try:
        scorer.setup()
    except ImportError as error:
        raise UserError(f"{name}: cannot be imported ({error}); install its package") from None
    return name, scorer.score
