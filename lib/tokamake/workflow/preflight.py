"""Checks of the runs that Snakemake is about to build, as `params` of their rules.

Snakemake evaluates params of planned jobs only. As functions of the output, they make no finished
job run again.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokamake.config.data_set import RUN
from tokamake.config.training import TrainSettings
from tokamake.data.indexed.paths import corpus_of
from tokamake.errors import UserError, naming
from tokamake.preflight.data import check_planned_data
from tokamake.preflight.detoxify import check_scorer
from tokamake.preflight.finetune import check_finetune_changes
from tokamake.preflight.packages import check_corpus_filters, check_training_packages
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.planned_changes import check_changes
from tokamake.preflight.run import check_ranks
from tokamake.retrieval.planned_search import check_bm25, check_index
from tokamake.workflow.exit import exit_on_user_error
from tokamake.workflow.retrieval import RetrievalRules
from tokamake.workflow.retro import RetroRules
from tokamake.workflow.snakemake_internals import Snakemake


def num_ranks(snakemake: Snakemake, rule: str) -> int | None:
    """Ranks that the profile gives a rule; None: an expression, without a value so far."""
    tasks = str(snakemake.rule_resources(rule).get("tasks", 1))
    return int(tasks) if tasks.isdecimal() else None


class Preflight:
    """Checks of all runs. In a job, nothing is planned, and nothing is checked.

    A method is the param of the rule with its name. It exits with one line for a user's mistake.
    """

    def __init__(
        self,
        config: WorkflowConfig,
        snakemake: Snakemake,
        *,
        retrieval: RetrievalRules | None = None,
        retro: RetroRules | None = None,
    ) -> None:
        self._config, self._retrieval, self._retro = config, retrieval, retro
        self._is_main_process = snakemake.is_main_process
        resources = {rule: snakemake.rule_resources(rule) for rule in ("train", "finetune")}
        self._num_ranks = {rule: num_ranks(snakemake, rule) for rule in resources}
        image = snakemake.default_resource("container")
        self._images = {rule: resources[rule].get("container") or image for rule in resources}
        self._spare_nodes = str(resources["train"].get("spare_nodes", 0))
        self._launch = Path(snakemake.launch)
        self._uses_conda = snakemake.uses_conda
        self._filtered = set[str]()
        self._scorer_is_checked = False
        self._checked: set[tuple[Callable[..., None], str]] = set()

    @exit_on_user_error()
    def tokenize(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check the filters of a job batch; conda gives jobs an environment with packages."""
        corpus = corpus_of(wildcards.batch)
        if self._is_main_process and not self._uses_conda and corpus not in self._filtered:
            check_corpus_filters(self._config, corpus)
            self._filtered.add(corpus)
        return []

    @exit_on_user_error()
    def score_texts(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check the scorer, once; conda gives jobs an environment with packages."""
        if self._is_main_process and not self._uses_conda and not self._scorer_is_checked:
            check_scorer(self._config)
            self._scorer_is_checked = True
        return []

    @exit_on_user_error()
    def index_blocks(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check that FAISS knows the index; conda gives jobs an environment with packages."""
        rules = self._retrieval
        if rules and rules.settings.index and self._is_main_process and not self._uses_conda:
            with naming(rules.where):
                check_index(rules.settings.index, dimension=rules.dimension(wildcards.run))
        return []

    @exit_on_user_error()
    def search_bm25(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check the package of BM25."""
        if self._retrieval and self._is_main_process and not self._uses_conda:
            with naming(self._retrieval.where):
                check_bm25()
        return []

    @exit_on_user_error()
    def index_chunks(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check that FAISS knows the index; conda gives jobs an environment with packages."""
        if self._retro and self._is_main_process and not self._uses_conda:
            self._retro.check_index(wildcards.run)
        return []

    @exit_on_user_error()
    def index(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check the data of a run: data of sentences may be built for other programs."""
        self._check_once(check_planned_data, wildcards.run)
        return []

    @exit_on_user_error()
    def train(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check data, packages, ranks and changes of a run."""
        name = wildcards.run
        self._check_once(check_planned_data, name)
        # A run may have been trained with another profile.
        is_trained = Path(RUN.format(run=name), f"train{wildcards.segment}.json").exists()
        if self._is_main_process and not is_trained:
            train = self._config.runs[name].train
            self._check_spare_nodes()
            self._check_ranks(name, train, rule="train")
        self._check_once(check_changes, name)
        return []

    @exit_on_user_error()
    def finetune(self, wildcards: Any, output: Any) -> list[str]:  # noqa: ARG002
        """Check packages, ranks and changes of a run that finetunes."""
        name = wildcards.run
        is_finetuned = Path(RUN.format(run=name), "finetune.json").exists()
        if self._is_main_process and not is_finetuned:
            train = self._config.finetuned[name].train
            settings = train.model_copy(update={"rampup_batch_size": None})
            self._check_ranks(name, settings, rule="finetune")
        self._check_once(check_finetune_changes, name)
        return []

    def _check_once(self, check: Callable[[WorkflowConfig, str], None], name: str) -> None:
        if self._is_main_process and (check, name) not in self._checked:
            self._checked.add((check, name))
            with naming(f"run {name}"):
                check(self._config, name)

    def _check_ranks(self, name: str, train: TrainSettings, *, rule: str) -> None:
        # Ranks in an image have packages of their own.
        if not (self._images[rule] or _has_image()):
            with naming(f"run {name}"):
                check_training_packages(train)
        if ranks := self._num_ranks[rule]:
            with naming(f"run {name}", f" (ranks: the resource tasks of the rule {rule})"):
                check_ranks(train, ranks)

    def _check_spare_nodes(self) -> None:
        is_local = self._launch.parent.name == "local"
        if self._num_ranks["train"] and is_local and self._spare_nodes != "0":
            raise UserError(
                f"resources of the rule train: spare_nodes: {self._spare_nodes}: {self._launch} "
                "has one machine; leave it out, or use a cluster's profile"
            )


def _has_image() -> bool:
    """Whether ranks run in an image: the user file of an executor, or the environment, names it."""
    if os.environ.get("JOB_CONTAINER"):
        return True
    if find_spec("snakemake_executor_plugin_pbs") is None:
        return False
    from snakemake_executor_plugin_pbs.base.user_file import has_value

    return has_value("container")
