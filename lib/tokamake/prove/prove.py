"""The tool `prove`: a run's layout trains as one process does, shown in miniature."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError, naming

if TYPE_CHECKING:
    import torch

    from tokamake.config.resolved_run import Run
    from tokamake.runtime.ranks import Ranks

_MOST_LINES = 20
"""Lines of differences that are printed."""
_MOST_RANKS = 64
_PARTLY = 3
"""Exit status if nothing differs, but the whole pipeline or all experts' ranks were not tried."""


def prove(
    config: Path,
    *settings: str,
    run: str | None = None,
    architecture: Path | None = None,
    most_ranks: int | None = None,
) -> None:
    """Prove that a run's layout computes the gradients of one process, with a tiny model.

    It keeps the run's parallelism, back end, ZeRO stage, recomputation, objective or task, family,
    optimizer, dropout and packing, and makes the model, the samples and the batches tiny. It trains
    two steps on all ranks, and the same two steps in one process that divides nothing. It compares
    losses, norms of gradients, the gradient of each tensor, and the change of each weight: first in
    fp32, where a wrong factor cannot hide, then in the precision of the run.

    Started alone, it starts its ranks on the cores of this machine. Started by torchrun, mpiexec or
    srun, it uses their ranks and devices. It reads no data and no weights, and writes nothing.

    The exit status is 1 if anything differs, and 3 if nothing differs, but these ranks were too few
    for the whole pipeline or for all ranks that divide experts.

    Args:
        config: A run.yaml, as `tokamake resolve` writes it, or a config of the workflow, before
            its data exist.
        settings: Settings that replace values of a config, such as
            `train.parallel.tensor_parallel_size=4`.
        run: Run of the config's table of runs; default: each run, one after the other.
        architecture: File of the model, such as config/models/llama2-7b.yaml, for a config whose
            checkpoint is on another machine; default: as the config says.
        most_ranks: Ranks that it may start on this machine, 64 by default. If the layout needs
            more, it shortens the pipeline, and then divides the experts among fewer ranks. After
            that, it proves the whole pipeline in fp32, without tensor, context and expert
            parallelism, if these ranks are enough.
    """
    from tokamake.prove.miniature import shortened
    from tokamake.prove.planned_runs import read_any
    from tokamake.runtime.process_group import joined
    from tokamake.runtime.rank_errors import leave, report_from_rank_0
    from tokamake.runtime.ranks import Ranks

    ranks = Ranks.find()
    if ranks.world_size > 1:
        with report_from_rank_0(ranks):
            if most_ranks is not None:
                raise UserError(
                    f"--most-ranks {most_ranks}: a launcher has started {ranks.world_size} ranks; "
                    "leave it out"
                )
            runs = read_any(config, run, settings=settings, architecture=architecture)
        with joined(ranks) as device:
            failed = [_prove_on(ranks, each, device=device) for each in runs]
        leave(ranks, int(any(failed)))
    most = _MOST_RANKS if most_ranks is None else most_ranks
    if most < 2:
        raise UserError(f"--most-ranks {most}: give 2 or more")
    shorter = []
    for each in read_any(config, run, settings=settings, architecture=architecture):
        with naming(f"run {each.run}"):  # before minutes of proofs of other runs
            shorter.append((each, shortened(each, most)))
    statuses = {_prove_here(each, short, most_ranks=most) for each, short in shorter}
    if status := next((each for each in (1, _PARTLY) if each in statuses), 0):
        raise SystemExit(status)


def _prove_on(ranks: "Ranks", run: "Run", *, device: "torch.device") -> bool:
    """Prove a run on ranks that a launcher has started; return whether the proof failed."""
    precisions, world_size = _precisions(run, device), ranks.world_size
    if ranks.rank == 0:
        print(_begin(run, world_size, precisions=precisions), flush=True)
    found = _prove(run, ranks, device=device, precisions=precisions)
    if ranks.rank == 0:
        print(_verdict(run, world_size, found=found, precisions=precisions), flush=True)
        if run.train.parallel.data_parallel_size(world_size) == 1:
            print(
                f"{run.run}: these ranks show nothing of data parallelism; start twice as many",
                flush=True,
            )
    return bool(found)


def _prove_here(run: "Run", short: "Run", *, most_ranks: int) -> int:
    """Prove a run on ranks of this machine; return the exit status."""
    import torch

    from tokamake.prove.miniature import num_ranks, with_pipeline_alone

    if short is not run:
        print(_shortening(run, short, most_ranks=most_ranks), flush=True)
    failed = _prove_layout(short, precisions=_precisions(short, torch.device("cpu")))
    whole, tried = run.train.parallel, short.train.parallel
    status = 0 if tried.expert_parallel_size == whole.expert_parallel_size else _PARTLY
    if (own := whole.pipeline_parallel_size) != tried.pipeline_parallel_size:
        alone = with_pipeline_alone(run)
        if (needed := num_ranks(alone)) > most_ranks:
            print(
                f"{run.run}: its pipeline of {own} ranks needs {needed} ranks alone, and is not "
                "proved; raise --most-ranks",
                flush=True,
            )
            status = _PARTLY
        else:
            print(
                f"{run.run}: now its pipeline of {own} ranks and data parallelism alone", flush=True
            )
            failed |= _prove_layout(alone, precisions=["fp32"])
    return 1 if failed else status


def _prove_layout(run: "Run", *, precisions: list[str]) -> bool:
    """Prove a layout that fits this machine; return whether the proof failed."""
    from tokamake.prove.local_ranks import on_local_ranks
    from tokamake.prove.miniature import num_ranks

    world_size = num_ranks(run)
    print(_begin(run, world_size, precisions=precisions), flush=True)
    with naming(f"run {run.run}"):
        found = on_local_ranks(partial(_prove, run, precisions=precisions), world_size)
    print(_verdict(run, world_size, found=found, precisions=precisions), flush=True)
    return bool(found)


def _precisions(run: "Run", device: "torch.device") -> list[str]:
    """Precisions that are proved, in this order: fp32, and the run's."""
    from tokamake.train.numerics import choose_precision

    return [*dict.fromkeys(("fp32", choose_precision(run.train, device)))]


def _begin(run: "Run", world_size: int, *, precisions: list[str]) -> str:
    return f"proving: {run.run}: {world_size} ranks, in {' and then in '.join(precisions)}"


def _shortening(run: "Run", short: "Run", *, most_ranks: int) -> str:
    own, new = run.train.parallel, short.train.parallel
    changed = []
    if (ranks := new.pipeline_parallel_size) != own.pipeline_parallel_size:
        changed.append(f"a pipeline of {ranks} ranks, not {own.pipeline_parallel_size}")
    if (ranks := new.expert_parallel_size) != own.expert_parallel_size:
        changed.append(f"experts divided by {ranks}, not {own.expert_parallel_size}")
    return f"{run.run}: {', '.join(changed)}, to start at most {most_ranks} ranks here"


def _prove(
    run: "Run", ranks: "Ranks", *, device: "torch.device", precisions: list[str]
) -> list[str]:
    """Differences in each precision; all ranks call it together."""
    from tokamake.prove.comparison import differences
    from tokamake.prove.miniature import miniature

    found = []
    for precision in precisions:
        tiny = miniature(run, ranks.world_size, precision=precision)
        found += [f"{precision}: {line}" for line in differences(tiny, ranks, device=device)]
    return found


def _verdict(run: "Run", world_size: int, *, found: list[str], precisions: list[str]) -> str:
    parallel = run.train.parallel
    layout = (
        f"{run.run}: tensor {parallel.tensor_parallel_size} × context "
        f"{parallel.context_parallel_size} × pipeline {parallel.pipeline_parallel_size} × data "
        f"{parallel.data_parallel_size(world_size)} = {world_size} ranks, {run.train.backend}, "
        f"ZeRO {run.train.zero_stage}"
    )
    if (size := parallel.expert_parallel_size) > 1:
        layout += f", experts divided by {size}"
    if not found:
        return (
            f"proved: {layout}: the same losses, gradients and weights as in one process, in "
            f"{' and '.join(precisions)}"
        )
    lines = "\n".join(f"  {line}" for line in found[:_MOST_LINES])
    more = len(found) - _MOST_LINES
    return (
        f"NOT proved: {layout}: not the numbers of one process\n{lines}"
        + (f"\n  and {more} more" if more > 0 else "")
        + "\nDo not train with this layout. Report these lines with the config, and use another "
        "layout until then."
    )
