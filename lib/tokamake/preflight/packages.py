"""The optional packages that filters, the back end, the optimizer and trackers need."""

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from tokamake import plugins
from tokamake.config.filters import (
    check_filter_inputs,
    check_filter_packages,
    unnamed_metadata,
)
from tokamake.config.train_sections import TRACKERS
from tokamake.config.training import BACKEND_CHECKS, TrainSettings
from tokamake.data.corpus.corpora import patterns
from tokamake.data.urls.url_list import is_url_list
from tokamake.errors import UserError, naming
from tokamake.preflight.planned import WorkflowConfig
from tokamake.runtime.requirements import required


def check_corpus_filters(config: WorkflowConfig, corpus: str) -> None:
    """Check packages of the filters and lists of URLs of a corpus, and files that filters read.

    Name filters that read fields and do not say which.
    """
    has_urls = any(map(is_url_list, patterns(config.corpora[corpus])))
    if has_urls and find_spec("fastwarc") is None:
        raise UserError(
            f"corpus {corpus}: lists of URLs need the package fastwarc, which this Python "
            "environment lacks; run `pip install 'tokamake[corpora]'`"
        )
    with naming(f"corpus {corpus}"):
        filters = config.filters(corpus)
        check_filter_packages(filters)
        check_filter_inputs(filters)
    for name in unnamed_metadata(filters):
        print(
            f"tokamake: corpus {corpus}: filters: {name}: reads document.metadata, but its "
            "metadata_keys name no field; tables, such as parquet and csv, have only fields that "
            "are named: add metadata_keys",
            file=sys.stderr,
        )


def check_training_packages(train: TrainSettings) -> None:
    """Check that the packages of the back end, the optimizer and the trackers are installed."""
    for setting, kind, name in _plug_ins(train):
        packages = plugins.constant(kind, name, "PACKAGES", default=())
        if missing := [package for package in packages if find_spec(package) is None]:
            # The extra has mlflow-skinny and its missing dependencies in place of mlflow.
            specs = ["tokamake[trackers]"] if kind == TRACKERS else map(_requirement, missing)
            command = "pip install " + " ".join(f"'{spec}'" for spec in specs)
            raise UserError(
                f"train.{setting}: {name}: needs {', '.join(missing)}, which this Python "
                f"environment lacks; run `{command}`, or change the setting"
            )


def _requirement(package: str) -> str:
    return f"{package}{required(package)}"


def _plug_ins(train: TrainSettings) -> Iterator[tuple[str, str, str]]:
    """Setting, kind and name of each plug-in of training."""
    yield "backend", BACKEND_CHECKS, train.backend
    yield "optimizer.name", "optim", train.optimizer.name
    for tracker in train.trackers.names:
        yield "trackers.names", TRACKERS, tracker
