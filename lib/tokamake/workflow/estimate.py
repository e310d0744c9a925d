"""Tool `estimate`: the cost of a workflow before it runs."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tokamake.errors import UserError, naming_overrides
from tokamake.runtime.console import print_lines

if TYPE_CHECKING:
    from tokamake.estimate.run import Allocation
    from tokamake.preflight.initial_models import InitialModel
    from tokamake.preflight.planned import WorkflowConfig

_MEGABYTE = 1_000_000


def estimate(
    config: Path,
    *settings: str,
    profile: str = "",
    device: str = "",
    nodes: int | None = None,
    mfu: float = 0.4,
    price_per_node_hour: float | None = None,
    sample_megabytes: int = 8,
    suggest: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> None:
    """Print the cost of a workflow before it runs: tokens, disk, steps, memory, time, money.

    Nothing is built. Tokens are counted in a sample of the raw files where a tokenizer exists, and
    read from the metadata where the data are built. Warnings name likely mistakes.

    Args:
        config: Config file.
        settings: Settings that replace values of the config, such as `train.train_steps=50`.
        profile: Name or folder of a profile, which states nodes, ranks, time limit and device. By
            default $SNAKEMAKE_PROFILE, else local.
        device: Device of a rank, such as a100-80gb or h100-80gb; by default the resource
            `device` of the rule train in the profile.
        nodes: Number of nodes, with as many ranks a node as in the profile.
        mfu: Share of the device's peak that training is assumed to reach.
        price_per_node_hour: Price of an hour of a node, in any currency.
        sample_megabytes: Megabytes to tokenize of each corpus; 0: tokens follow from file sizes.
        suggest: Instead, list layouts of the runs that fit the memory of the device, the fastest
            first.
        as_json: Print JSON.
    """
    from tokamake.estimate import text
    from tokamake.estimate.run import Assumptions
    from tokamake.estimate.workflow import estimate_workflow

    _check(mfu, nodes, price=price_per_node_hour, sample_megabytes=sample_megabytes)
    allocation = read_allocation(profile, device=device, nodes=nodes)
    checked, models = _read(config, settings, num_ranks=allocation.ranks, reads_data=not suggest)
    if suggest:
        _suggest(checked, models, allocation=allocation, as_json=as_json)
        return
    found = estimate_workflow(
        checked,
        models,
        allocation=allocation,
        assumptions=Assumptions(mfu, price_per_node_hour),
        sample_bytes=sample_megabytes * _MEGABYTE,
    )
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
        return
    print_lines(text.full(found))


def _check(mfu: float, nodes: int | None, *, price: float | None, sample_megabytes: int) -> None:
    """Check the numbers of the command line."""
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu:g}: give a share of the peak, above 0 and at most 1")
    if nodes is not None and nodes < 1:
        raise UserError(f"--nodes {nodes}: give at least 1 node")
    if price is not None and not 0 <= price < math.inf:
        raise UserError(f"--price-per-node-hour {price:g}: give a price of at least 0")
    if sample_megabytes < 0:
        raise UserError(
            f"--sample-megabytes {sample_megabytes}: give at least 0; 0 reads no raw files"
        )


def read_allocation(profile: str, *, device: str = "", nodes: int | None = None) -> "Allocation":
    """Read nodes, ranks, time limit and device of a training from a profile."""
    import os

    from tokamake.doctor.find_profile import find_profile
    from tokamake.doctor.profile import read_profile
    from tokamake.estimate.run import allocation_of

    name = profile or os.environ.get("SNAKEMAKE_PROFILE", "local")
    found = read_profile(find_profile(name), Path.cwd())
    resources = {key: found.resource(key, "train") for key in ("nodes", "tasks", "runtime")}
    stated = device or str(found.resource("device", "train") or "")
    return allocation_of({**resources, "device": stated}, nodes=nodes)


def _read(
    path: Path, settings: tuple[str, ...], *, num_ranks: int, reads_data: bool
) -> "tuple[WorkflowConfig, dict[str, InitialModel]]":
    """Read and check a config as the workflow does; or its runs and models alone."""
    from tokamake.config.fields import dotted
    from tokamake.config.overrides import merged, read_overrides
    from tokamake.config_files import read_yaml
    from tokamake.run.command_line import check_config
    from tokamake.workflow.config import shown_files

    check_config(path)
    overrides = read_overrides(settings)
    values = merged(read_yaml(path, "name your config file"), overrides)
    with naming_overrides(shown_files([path]), dotted(overrides)):
        return _checked(path, values, num_ranks=num_ranks, reads_data=reads_data)


def _checked(
    path: Path, values: dict[str, Any], *, num_ranks: int, reads_data: bool
) -> "tuple[WorkflowConfig, dict[str, InitialModel]]":
    """Check a config as `_read` does."""
    from tokamake.config.fields import FETCH
    from tokamake.config.runs import read_runs
    from tokamake.data.corpus.plan_file import Plan
    from tokamake.preflight.initial_models import check_initial_models
    from tokamake.preflight.planned import WorkflowConfig
    from tokamake.workflow.config import check_workflow_config, read_workflow_config, shown_files

    if not reads_data:
        runs = read_runs(values, shown_files([path]), context={"num_ranks": num_ranks} | FETCH)
        none = Plan({}, "", (), (), (), (), ())
        config = WorkflowConfig(runs, {}, {}, {}, plan=none, previous_plan=None)
        pretrained = {name: runs[name] for name in config.runs}
        return config, check_initial_models(pretrained, is_main_process=True)
    checked = read_workflow_config(values, [path], is_main_process=True, num_ranks=num_ranks)
    return checked, check_workflow_config(checked, is_main_process=True)


def _suggest(
    config: "WorkflowConfig",
    models: "dict[str, InitialModel]",
    *,
    allocation: "Allocation",
    as_json: bool,
) -> None:
    """Print layouts of each run."""
    from tokamake.estimate.layouts import lines, suggested
    from tokamake.estimate.workflow import filled_in

    if allocation.accelerator is None:
        raise UserError(
            "--suggest: the profile states no device; give one with --device, such as h100-80gb"
        )
    found = {
        name: suggested(run, filled_in(models[name].architecture, config), allocation=allocation)
        for name, run in config.runs.items()
        if name in models
    }
    if as_json:
        print(json.dumps({name: [e.as_json() for e in each] for name, each in found.items()}))
        return
    for name, layouts in found.items():
        print_lines(lines(name, layouts, allocation=allocation))
