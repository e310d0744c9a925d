"""Models of runs that finetune against their task, before any job runs."""

from collections.abc import Mapping

from tokamake.config.root import Config
from tokamake.config.runs import NamedRun
from tokamake.errors import UserError
from tokamake.preflight.finetune import check_files, check_model, finetuned_architecture
from tokamake.workflow.initial_checkpoints import InitialModel, initial_model, parents_first
from tokamake.workflow.snakemake_internals import has_wildcard


def check_finetuned(
    runs: Mapping[str, NamedRun], models: Mapping[str, InitialModel], *, is_main_process: bool
) -> None:
    """Check the runs that finetune: their files, and whether their models can have a head.

    Args:
        runs: config of each run, of those that pretrain, too.
        models: initial models of the runs that pretrain, as far as they are opened.
        is_main_process: whether files and checkpoints are opened.

    Raises:
        UserError: files are missing, or a model cannot be finetuned on its task.
    """
    if not is_main_process:
        return
    known = dict(models)
    for name in parents_first(runs):
        run, where = runs[name]
        if run.finetune is None:
            continue
        try:
            _check_files(run)
            initial = _pretrained(run, known)
            architecture = finetuned_architecture(initial.architecture, run.finetune.task)
            check_model(
                run.train, architecture, tokenizer=run.tokenizer.path, source=initial.source
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        known[name] = initial


def _pretrained(run: Config, known: Mapping[str, InitialModel]) -> InitialModel:
    if run.model.parent:
        return known[run.model.parent]
    return initial_model(run)


def _check_files(run: Config) -> None:
    assert run.finetune is not None, "such a run finetunes"
    for path in check_files(run.finetune):
        if has_wildcard(path):
            raise UserError(
                f"finetune: {path}: braces in a path are wildcards of Snakemake; rename the file "
                "or folder"
            )
