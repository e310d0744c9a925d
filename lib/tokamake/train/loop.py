"""The training loop: from a resolved run to its last checkpoint.

Samples come from the index, steps are done by `engine`; checkpoints, metrics and, at the very end,
train.json go to disk. Every decision is taken alike on all ranks.
"""

import math
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tokamake import files, plugins
from tokamake.checkpoint import megatron_deepspeed
from tokamake.config import Run
from tokamake.data.samples.fim import FimSamples
from tokamake.data.samples.fim_tokens import Fim
from tokamake.data.samples.folder import read_index
from tokamake.data.samples.loader import Rows, Samples, batches, steps
from tokamake.errors import UserError
from tokamake.runtime import Ranks, ahead, same_fate
from tokamake.train import metrics, restart
from tokamake.train.metrics import Metrics, Record, console_line
from tokamake.train.resolve import check_lengths
from tokamake.train.restart import State

if TYPE_CHECKING:
    import torch

    from tokamake.data.samples.loader import Step
    from tokamake.train.engine import Batch

STOPPED = 75
"""Exit code of a run that was asked to stop before its end: EX_TEMPFAIL of sysexits.h."""


def train_run(run: Run, ranks: Ranks, device: "torch.device") -> int:
    """Train, or continue, or find that nothing is left to do.

    Args:
        run: the resolved run.
        ranks: this process among its peers, all in one process group.
        device: where the model lives.

    Returns:
        Exit code: 0, or `STOPPED`.

    Raises:
        UserError: the run cannot start or its loss is not finite; all ranks raise it.
    """
    with ExitStack() as held:
        with same_fate():
            described = read_index(run.index)
            check_lengths(run.train, run.architecture, described, run.index)
            run.train.batch_sizes.check(run.train.micro_batch_size, ranks.world_size)
        digest, state = _agree(run, ranks, described, held)
        if state and state.step >= run.train.train_steps:
            _say(ranks, f"{run.output}: already at step {state.step}, the last; nothing to train")
        else:
            state = Loop(run, ranks, device, digest=digest, state=state).run()
        if state.step < run.train.train_steps:
            return STOPPED
        if ranks.rank == 0:
            _write_summary(run, state)
    return 0


def _say(ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        print(line, flush=True)


def _agree(
    run: Run, ranks: Ranks, described: dict[str, Any], held: ExitStack
) -> tuple[str, State | None]:
    """Let rank 0 claim the output folder and tell all where to continue."""
    found: list[Any] = [None]
    with same_fate():
        if ranks.rank == 0:
            held.enter_context(restart.locked(run.output))
            weights = restart.weights_digest(run.checkpoint)
            digest = restart.run_digest(run, index=described, weights=weights)
            found = [(digest, restart.claim(run.output, digest, lambda line: _say(ranks, line)))]
    dist.broadcast_object_list(found, src=0)
    state: State | None
    digest, state = found[0]
    finished = state and state.step >= run.train.train_steps
    if state and not finished and state.world_size != ranks.world_size:
        raise UserError(
            f"{run.output}: step {state.step} was saved by {state.world_size} ranks, not "
            f"{ranks.world_size}; start {state.world_size} ranks to continue"
        )
    return digest, state


class Loop:
    """One rank's loop over the steps that are left.

    Args:
        run: the resolved run.
        ranks: this process among its peers.
        device: where the model lives.
        digest: of the run, stored with each checkpoint.
        state: where to continue; None for a run that has not begun.
    """

    def __init__(
        self, run: Run, ranks: Ranks, device: "torch.device", *, digest: str, state: State | None
    ) -> None:
        # DeepSpeed takes seconds to import, which a run with nothing left to do need not wait for.
        from tokamake.train.engine import Engine

        self._run, self._ranks, self._train = run, ranks, run.train
        self._state = state or State(digest, 0, 0, 0.0, ranks.world_size)
        self._last_checkpoint = f"{run.checkpoint} (the start)"
        self._stop = False
        self._sizes = run.train.batch_sizes
        self._factor = plugins.load("schedules", run.train.schedule.name).factor
        family = plugins.load("models", run.architecture.family)
        self._flops_per_token = family.num_flops_per_token(
            run.architecture, run.train.sequence_length
        )
        with same_fate():
            first = ranks.rank == 0
            self._samples = training_samples(run, verify=first)
            self._validation = _validation(run, verify=first)
        self._engine = Engine(run, ranks, device)
        if state:
            tag = f"global_step{state.step}"
            self._engine.load(run.output, tag=tag)
            self._last_checkpoint = str(run.output / tag)
            _say(ranks, f"{run.output}: continuing at step {state.step}")
        self._metrics = None if ranks.rank else Metrics(run.output, done=self._state.step)

    def run(self) -> State:
        """Do the steps that are left, or fewer if SIGTERM comes; the last one done is saved."""
        before = signal.signal(signal.SIGTERM, self._request_stop)
        try:
            self._do_steps()
        finally:
            signal.signal(signal.SIGTERM, before)
            if self._metrics:
                self._metrics.close()
        return self._state

    def _request_stop(self, *_: Any) -> None:
        self._stop = True

    def _do_steps(self) -> None:
        if self._state.step == 0:
            self._evaluate()
        coming = ahead(self._steps())
        pace = _Pace()
        while self._state.step < self._train.train_steps:
            begin = time.perf_counter()
            learning_rate = self._learning_rate()
            step = next(coming)
            loss, norm, stop = self._engine.train_step(
                step.micro_batches,
                learning_rate=learning_rate,
                stop=self._stop,
            )
            self._check_finite(loss, norm)
            self._advance(step.global_batch_size, time.perf_counter() - begin, pace)
            if self._due(self._train.log_interval) or self._state.step == 1:
                self._log({"loss": loss, "learning_rate": learning_rate, "grad_norm": norm}, pace)
                pace = _Pace()
            if self._due(self._train.evaluation_interval):
                self._evaluate()
            if stop or self._due(self._train.save_interval):
                self._save()
            if stop and self._state.step < self._train.train_steps:
                return self._say(f"stopped by SIGTERM at step {self._state.step}, which is saved")
        return None

    def _say(self, line: str) -> None:
        _say(self._ranks, line)

    def _due(self, interval: int) -> bool:
        return self._state.step % interval == 0 or self._state.step == self._train.train_steps

    def _num_micro_batches(self) -> int:
        block = self._train.micro_batch_size * self._ranks.world_size
        return self._train.global_batch_size // block

    def _steps(self) -> "Iterator[Step]":
        return steps(
            self._samples,
            self._sizes,
            consumed_samples=self._state.consumed_samples,
            micro_batch_size=self._train.micro_batch_size,
            data_parallel_rank=self._ranks.rank,
            data_parallel_size=self._ranks.world_size,
        )

    def _batches(self, samples: Rows, consumed_samples: int) -> "Iterator[Batch]":
        return batches(
            samples,
            consumed_samples=consumed_samples,
            micro_batch_size=self._train.micro_batch_size,
            data_parallel_rank=self._ranks.rank,
            data_parallel_size=self._ranks.world_size,
        )

    def _learning_rate(self) -> float:
        share: float = self._factor(
            self._state.step,
            warmup_steps=self._train.schedule.warmup_steps,
            train_steps=self._train.train_steps,
            min_ratio=self._train.schedule.min_ratio,
        )
        return self._train.optimizer.learning_rate * share

    def _check_finite(self, loss: float, norm: float) -> None:
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise UserError(
                    f"step {self._state.step + 1}: {name}: {value}: training has diverged; lower "
                    "train.optimizer.learning_rate or check the data; last good checkpoint: "
                    f"{self._last_checkpoint}"
                )

    def _advance(self, samples: int, seconds: float, pace: "_Pace") -> None:
        pace.steps, pace.samples = pace.steps + 1, pace.samples + samples
        pace.seconds += seconds
        self._state = self._state._replace(
            step=self._state.step + 1,
            consumed_samples=self._state.consumed_samples + samples,
            seconds=self._state.seconds + seconds,
        )

    def _log(self, measured: Record, pace: "_Pace") -> None:
        if not self._metrics:
            return
        step_seconds = pace.seconds / pace.steps
        tokens = pace.samples * self._train.sequence_length
        record = {
            "step": self._state.step,
            "consumed_samples": self._state.consumed_samples,
            "consumed_tokens": self._state.consumed_samples * self._train.sequence_length,
            **measured,
            "tokens_per_second": tokens / pace.seconds,
            "model_flops_per_second": tokens / pace.seconds * self._flops_per_token,
            "step_seconds": step_seconds,
        }
        self._metrics.add(record)
        left = (self._train.train_steps - self._state.step) * step_seconds
        line = console_line(record, train_steps=self._train.train_steps, seconds_left=left)
        self._say(line)

    def _evaluate(self) -> None:
        if not self._validation:
            return
        losses = {name: self._loss(*measured) for name, measured in self._validation.items()}
        if self._metrics:
            self._metrics.add({"step": self._state.step, **metrics.validation(losses)})
        told = (f"{metrics.title(name)} {loss:.4f}" for name, loss in losses.items())
        self._say(f"step {self._state.step}/{self._train.train_steps} | {' | '.join(told)}")

    def _loss(self, samples: Samples, num_steps: int) -> float:
        num_batches = num_steps * self._num_micro_batches()
        return self._engine.mean_loss(islice(self._batches(samples, 0), num_batches))

    def _save(self) -> None:
        tokens = self._state.consumed_samples * self._train.sequence_length
        state = megatron_deepspeed.client_state(
            self._run.architecture, iteration=self._state.step, tokens=tokens
        )
        state["args"].consumed_train_samples = self._state.consumed_samples
        state["run_digest"] = self._state.digest
        if self._metrics:
            self._metrics.sync()
        folder = self._run.output / restart.SAVING
        self._engine.save(folder, tag=f"global_step{self._state.step}", state=state)
        if self._ranks.rank == 0:
            restart.commit(self._run.output, self._state)
        dist.barrier()
        self._last_checkpoint = str(self._run.output / f"global_step{self._state.step}")
        self._say(f"saved {self._last_checkpoint}")


@dataclass
class _Pace:
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0


def training_samples(run: Run, *, verify: bool = True) -> Samples | FimSamples:
    """Samples of the run, rearranged if it says so."""
    samples = Samples(run.index, split="train", data_root=run.data_root, verify=verify)
    fim = Fim(**run.train.fim.model_dump())
    if not fim.rate:
        return samples
    if run.tokenizer is None:
        raise UserError("train.fim.rate: needs a tokenizer; run `tokamake resolve` again")
    return FimSamples(samples, fim, tokenizer=run.tokenizer, seed=run.seed, verify=verify)


def _validation(run: Run, *, verify: bool) -> dict[str, tuple[Samples, int]]:
    """Samples of each validation set, and how many global batches of them are measured."""
    if not run.train.evaluation_steps:
        return {}
    found = {}
    for name in read_index(run.index)["splits"]:
        if name != "train":
            samples = Samples(run.index, split=name, data_root=run.data_root, verify=verify)
            steps = min(run.train.evaluation_steps, len(samples) // run.train.global_batch_size)
            if steps:
                found[name] = (samples, steps)
    return found


def _write_summary(run: Run, state: State) -> None:
    tokens = state.consumed_samples * run.train.sequence_length
    files.write_json(
        run.output.parent / "train.json",
        {
            "run": run.run,
            "digest": state.digest,
            "step": state.step,
            **metrics.summary(metrics.read(run.output / "metrics.jsonl")),
            "consumed_samples": state.consumed_samples,
            "consumed_tokens": tokens,
            "seconds": state.seconds,
            "tokens_per_second": tokens / state.seconds,
            "checkpoint": str(run.output / f"global_step{state.step}"),
            "world_size": state.world_size,
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("tokamake", "torch", "deepspeed")},
            },
        },
    )
