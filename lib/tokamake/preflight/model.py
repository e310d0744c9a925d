"""The model against the settings of a run: facts are the config and the model's architecture."""

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.families import FAMILIES, objectives
from tokamake.config.objective import objective_data
from tokamake.config.train_sections import MTPSettings, RouterSettings
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError


def check_objective(train: TrainSettings, architecture: Architecture) -> None:
    """Refuse an objective that the model's family or its heads do not learn."""
    if (task_head := (architecture.model_extra or {}).get("task_head", "none")) != "none":
        raise UserError(
            f"train.objective: {train.objective}: the model is finetuned: it has a head of "
            f"{task_head} in place of the one that learns this; start from the pretrained model"
        )
    known = objectives(architecture.family)
    if train.objective in known:
        _check_without_logits(train, architecture)
        objective_data(train.objective).check_model(train, architecture)
        return
    families = [name for name in plugins.names(FAMILIES) if train.objective in objectives(name)]
    of_families = f"one of the families {', '.join(families)}"
    if len(families) == 1:
        of_families = f"family {families[0]}"
    choice = f", or choose a model of {of_families}" if families else ""
    raise UserError(
        f"train.objective: {train.objective}: family {architecture.family} learns "
        f"{' or '.join(known)}; set it to {known[0]}{choice}"
    )


def _check_without_logits(train: TrainSettings, architecture: Architecture) -> None:
    """Refuse settings that need losses or labels of tokens if the model has no logits."""
    if not architecture.has_towers:
        return
    if train.log_corpus_losses:
        raise UserError(
            f"train.log_corpus_losses: true: objective {train.objective} has no losses of tokens; "
            "remove it"
        )
    if train.optimizer.facts.extra_pass:
        raise UserError(
            f"train.optimizer.name: {train.optimizer.name}: draws labels of tokens, and objective "
            f"{train.objective} has none; choose another optimizer"
        )


def check_sequence_length(
    train: TrainSettings, architecture: Architecture, *, source: str = "the model"
) -> None:
    """Check that the model sees as many tokens as a sequence has; `source` is for the message."""
    if train.sequence_length > (limit := architecture.max_position_embeddings):
        raise UserError(
            f"train.sequence_length: {train.sequence_length}: more than the {limit} "
            f"max_position_embeddings of {source}; lower it"
        )
    objective_data(train.objective).check_lengths(train, limit, source=source)


def check_layout(train: TrainSettings, architecture: Architecture) -> None:
    """Check that ranks can share the model and its sequences."""
    train.parallel.check_architecture(architecture, train.sequence_length)
    if not architecture.has_routers and train.router != RouterSettings():
        raise UserError(
            f"train.router: has no effect: family {architecture.family} has no routers; remove it"
        )
    _check_further_tokens(train, architecture)
    usual = RouterSettings().bias_update_rate
    if train.router.bias_update_rate != usual and not architecture.has_router_biases:
        raise UserError(
            f"train.router.bias_update_rate: {train.router.bias_update_rate}: has no effect: "
            f"routers of family {architecture.family} have no biases; remove it"
        )


def _check_further_tokens(train: TrainSettings, architecture: Architecture) -> None:
    """Check that a run can train layers that predict further tokens (MTP)."""
    if not architecture.num_mtp_layers:
        if train.mtp != MTPSettings():
            raise UserError(
                "train.mtp: has no effect: the model has no layers that predict further tokens "
                "(num_nextn_predict_layers); remove it"
            )
        return
    remedy = "or set num_nextn_predict_layers of the model to 0"
    if train.optimizer.facts.extra_pass:
        raise UserError(
            f"train.optimizer.name: {train.optimizer.name}: looks at labels of the next token "
            "alone, and the model has layers that predict further tokens; choose another "
            f"optimizer, {remedy}"
        )
    parallel = train.parallel
    if parallel.splits_backward:
        raise UserError(
            f"train.parallel.pipeline_schedule: {parallel.pipeline_schedule}: computes gradients "
            "of weights late, which is impossible for layers that predict further tokens; use "
            f"interleaved_1f1b, {remedy}"
        )


def check_layout_and_length(
    train: TrainSettings, architecture: Architecture, *, source: str = "the model"
) -> None:
    """Check that a layout divides the model, and that the model sees whole sequences."""
    check_layout(train, architecture)
    check_sequence_length(train, architecture, source=source)
