"""What a run may be told: a Pydantic model per section of config/config.yaml, a docstring a field.

Values come from YAML, through the workflow or `tokamake train --config`, and leave frozen.
Nothing here knows where a run takes place: that is the profiles' business. Sections are imported
when they are asked for, since whoever needs one seldom needs all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokamake.config.architecture import Architecture, read_architecture
    from tokamake.config.data import PlanSettings, SampleCorpus, TokenizerSettings, TokenizeSettings
    from tokamake.config.fields import Name, Settings, plug_in, split_shares
    from tokamake.config.model import FORMAT_SIZES, Form, ModelSettings, check_form, parse_form
    from tokamake.config.optimization import OptimizerSettings
    from tokamake.config.parallel import ParallelSettings
    from tokamake.config.resolved_run import (
        ROOT_VARIABLE,
        ResolvedTrainSettings,
        Run,
        read_run,
        write_run,
    )
    from tokamake.config.root import Config, EvaluateSettings, GenerateSettings, schema
    from tokamake.config.runs import NamedRun, read_runs
    from tokamake.config.schedule import ScheduleSettings
    from tokamake.config.training import (
        INDEX_SETTINGS,
        PACKING_SETTINGS,
        FimSettings,
        TrainSettings,
    )

__all__ = [
    "FORMAT_SIZES",
    "INDEX_SETTINGS",
    "PACKING_SETTINGS",
    "ROOT_VARIABLE",
    "Architecture",
    "Config",
    "EvaluateSettings",
    "FimSettings",
    "Form",
    "GenerateSettings",
    "ModelSettings",
    "Name",
    "NamedRun",
    "OptimizerSettings",
    "ParallelSettings",
    "PlanSettings",
    "ResolvedTrainSettings",
    "Run",
    "SampleCorpus",
    "ScheduleSettings",
    "Settings",
    "TokenizeSettings",
    "TokenizerSettings",
    "TrainSettings",
    "check_form",
    "parse_form",
    "plug_in",
    "read_architecture",
    "read_run",
    "read_runs",
    "schema",
    "split_shares",
    "write_run",
]

_SECTIONS = (
    *(
        "fields",
        "architecture",
        "model",
        "data",
        "optimization",
        "parallel",
        "schedule",
        "training",
    ),
    *("resolved_run", "root", "runs"),
)


def __getattr__(name: str) -> Any:
    for section in _SECTIONS if name in __all__ else ():
        found = vars(import_module(f"{__name__}.{section}"))
        if name in found:
            return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
