"""Where a run stands at a checkpoint: the content of state.json, and the changes until there."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.checkpoint.latest import latest
from tokamake.checkpoint.native.folder import DESCRIPTION
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError

HASHED = ("run.yaml", DESCRIPTION, "finetune.json")
"""Files of a checkpoint whose hashes state.json has, if they are there."""


class GuardState(NamedTuple):
    """State of the guard that a checkpoint keeps."""

    recent: tuple[tuple[float, float], ...] = ()
    """Loss and gradient norm of the last good steps."""
    rate_factor: float = 1.0
    """Factor of the learning rate."""
    skipped: tuple[int, ...] = ()
    """Steps without an update, except the steps of `train.skip_data`. After a return to a
    checkpoint, some may be later than the current step."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "GuardState":
        """Read the result of `to_json`."""
        recent = tuple(zip(value["losses"], value["grad_norms"], strict=True))
        return cls(recent, float(value["rate_factor"]), tuple(value["skipped"]))

    def to_json(self) -> dict[str, Any]:
        losses, norms = zip(*self.recent, strict=True) if self.recent else ((), ())
        return {
            "losses": losses,
            "grad_norms": norms,
            "rate_factor": self.rate_factor,
            "skipped": self.skipped,
        }

    def effect(self, step: int) -> dict[str, Any]:
        """Changes of the weights by bad steps up to a step; empty if there are none."""
        skipped = [number for number in self.skipped if number <= step]
        changed = skipped or self.rate_factor != 1.0
        return {"skipped": skipped, "rate_factor": self.rate_factor} if changed else {}

    def until(self, step: int) -> "GuardState":
        """The state without skipped steps after `step`: the journal knows them, too."""
        return self._replace(skipped=tuple(number for number in self.skipped if number <= step))

    def after_good(self, loss: float, grad_norm: float, *, window: int) -> "GuardState":
        """The state after a step that updated the weights."""
        return self._replace(recent=(*self.recent, (loss, grad_norm))[-window:])

    def after_skip(self, *steps: int) -> "GuardState":
        """The state with more skipped steps, past or future."""
        return self._replace(skipped=tuple(sorted({*self.skipped, *steps})))


def ranges_without_effect(ranges: Sequence[tuple[int, int]], step: int) -> str | None:
    """Name ranges of `train.skip_data` before the position of a run; None: there are none."""
    before = [
        f"{first} to {last}" if first < last else str(first)
        for first, last in ranges
        if last <= step
    ]
    if not before:
        return None
    return f"no effect on steps {', '.join(before)}: training is already at step {step:,}"


class LineageEntry(NamedTuple):
    """A point where a run continued with other settings or data."""

    step: int
    """Finished steps before the change."""
    consumed_samples: int
    """Samples trained on before the change."""
    digest: str
    """Digest of the run before the change."""
    changed: tuple[str, ...]
    """Differences, such as `train.optimizer.learning_rate 0.001 -> 0.0003`."""


class ResumeState(NamedTuple):
    """Where a run stands at a checkpoint: the content of state.json."""

    digest: str
    """Digest of the run, see `run_digest`."""
    step: int
    """Finished steps."""
    consumed_samples: int
    """Samples trained on."""
    seconds: float
    """Time spent in training steps, over all jobs of the run."""
    world_size: int
    """Number of ranks."""
    lineage: tuple[LineageEntry, ...] = ()
    """Changes with which the run was continued, from the first to the last."""
    guard: GuardState = GuardState()
    """Last good steps, to compare the next ones with, and effects of bad steps."""
    updates: int | None = 0
    """Steps of the run that updated the weights; None: an earlier version did not count them."""

    def after_step(self, samples: int, seconds: float, *, updated: bool) -> "ResumeState":
        """The state after one more step, which has updated the weights or not."""
        return self._replace(
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            seconds=self.seconds + seconds,
            updates=None if self.updates is None else self.updates + updated,
        )

    def changed(self, digest: str, changed: tuple[str, ...]) -> "ResumeState":
        """The same state of a run with another digest."""
        change = LineageEntry(self.step, self.consumed_samples, self.digest, changed)
        return self._replace(digest=digest, lineage=(*self.lineage, change))

    def is_before(self, later: "ResumeState") -> bool:
        """Whether a run that is at `later` has passed this state, before or after a change."""
        if self.digest == later.digest:
            return self.step <= later.step
        return any(
            self.digest == change.digest and self.step <= change.step for change in later.lineage
        )

    def in_place_of(self, later: "ResumeState") -> "ResumeState":
        """This earlier state with the run of `later`, whose changes come no later than now."""
        lineage = tuple(
            change._replace(
                step=min(change.step, self.step),
                consumed_samples=min(change.consumed_samples, self.consumed_samples),
            )
            for change in later.lineage
        )
        return self._replace(digest=later.digest, lineage=lineage)

    def to_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "lineage": [change._asdict() for change in self.lineage],
            "guard": self.guard.to_json(),
        }


def read_state(folder: Path, *, thorough: bool = False) -> ResumeState | None:
    """Read a checkpoint's state.json, or None; `thorough` also compares the hashes of `HASHED`."""
    path = folder / "state.json"
    if not path.is_file():
        return None
    remedy = f"name another checkpoint in {folder.parent / 'latest'}"
    value = files.read_sealed_json(path, remedy)
    try:
        hashes = value.pop("files", {})  # earlier versions have none
        for name, expected in hashes.items() if thorough else ():
            if not (folder / name).is_file() or files.sha256(folder / name) != expected:
                raise UserError(
                    f"{folder / name}: does not match its hash in {path.name}; {remedy}"
                )
        lineage = tuple(
            LineageEntry(**{**change, "changed": tuple(change["changed"])})
            for change in value.pop("lineage", ())  # earlier versions have none
        )
        noted = value.pop("guard", None)
        guard = GuardState.from_json(noted) if noted else GuardState()
        return ResumeState(**{"updates": None, **value}, lineage=lineage, guard=guard)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"{path}: damaged; {remedy}") from None


def newest_state(output: Path) -> tuple[ResumeState | None, str]:
    """State of the checkpoint that `latest` names in a folder, or of the newest readable one.

    Returns:
        The state, and a line about damage, or an empty text. None: there is no checkpoint.

    Raises:
        UserError: no state can be read in place of a missing or damaged one.
    """
    pointer = output / "latest"
    if not pointer.is_file():
        problem = f"{pointer}: missing"
    else:
        try:
            folder = latest(output)
            if state := read_state(folder, thorough=True):
                return state, ""
            if not (folder / "run.yaml").is_file():  # another program wrote it
                return ResumeState("unknown", 0, 0, 0.0, 0), ""
            problem = f"{folder / 'state.json'}: missing"
        except UserError as error:
            problem = str(error)
    if newest := max(_readable_states(output), key=lambda state: state.step, default=None):
        reason, _, _ = problem.partition("; ")
        return newest, f"{reason}: going back to {output / f'global_step{newest.step}'}"
    if not pointer.is_file():
        return None, ""
    raise UserError(problem)


def _readable_states(output: Path) -> Iterator[ResumeState]:
    for folder in output.glob("global_step*"):
        with suppress(UserError):
            state = read_state(folder, thorough=True)
            # A folder that was replaced, global_step4.old, does not have the name of its step.
            if state and folder.name == f"global_step{state.step}":
                yield state


def run_since_change(run: Run, state: ResumeState) -> Run:
    """The run with the steps that it has from its last change on."""
    if not state.lineage:
        return run
    change = state.lineage[-1]
    train = run.train.counted_from(change.step, change.consumed_samples)
    return run.model_copy(update={"train": train})
