"""Objectives of runs against their data and models, before any job runs.

`index` and `train` check them again, with the datasets that then exist.
"""

from typing import Any

from tokamake.config.architecture import read_architecture
from tokamake.config.root import Config
from tokamake.errors import UserError
from tokamake.preflight.checks import check_objective
from tokamake.workflow.config import WorkflowConfig
from tokamake.workflow.exit import exit_on_user_error


class ObjectiveCheck:
    """Checks of the objectives of all runs; the wildcard is `run`."""

    def __init__(self, config: WorkflowConfig, *, is_main_process: bool) -> None:
        self._config = config
        self._is_main_process = is_main_process
        self._checked: set[str] = set()

    @exit_on_user_error()
    def check(self, wildcards: Any) -> None:
        """Check the objective of a run.

        Snakemake calls this only if the run is part of what it builds: data of sentences may be
        built for other programs.

        Raises:
            SystemExit: data, tokenizer or model do not fit the objective.
        """
        name = str(wildcards.run)
        if not self._is_main_process or name in self._checked:
            return
        self._checked.add(name)
        run = self._config.runs[name]
        try:
            if run.model.stated:
                check_objective(run.train, read_architecture(run.model.stated))
            if any(corpus.trains and not corpus.is_indexed for corpus in self._config.tables[name]):
                _check_data(run)
            if self._config.given_tokenizer is None:
                _check_trained_tokenizer(run)
        except UserError as error:
            raise UserError(f"run {name}: {error}") from None


def _check_data(run: Config) -> None:
    """Check the data that the workflow tokenizes."""
    objective, tokenize = run.train.objective, run.tokenize
    if objective == "causal":
        if tokenize.split_sentences:
            raise UserError(
                "tokenize.split_sentences: true: objective causal would be trained on shuffled "
                "sentences; set train.objective to masked or span_corruption, or split_sentences "
                "to false"
            )
        return
    if not tokenize.split_sentences:
        raise UserError(
            f"train.objective: {objective}: needs sentences; set tokenize.split_sentences to true"
        )
    if tokenize.append_eod:
        raise UserError(
            f"tokenize.append_eod: true: samples of objective {objective} have separators of their "
            "own; set it to false"
        )


def _check_trained_tokenizer(run: Config) -> None:
    """Check the tokenizer that the workflow trains."""
    objective, tokenizer = run.train.objective, run.tokenizer
    if objective != "causal" and tokenizer.kind != "wordpiece":
        raise UserError(
            f"tokenizer.kind: {tokenizer.kind}: objective {objective} masks whole words, which "
            "only a WordPiece tokenizer marks; set it to wordpiece"
        )
    if objective == "span_corruption" and not tokenizer.sentinels:
        raise UserError(
            "tokenizer.sentinels: 0: objective span_corruption replaces spans by sentinels; set it "
            "to 100, as T5 has"
        )
