"""What a check found: a name, a state, a value and, where it is not ok, the remedy."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    """What was looked at."""
    state: State
    """A warning can cost time or a result; with what is wrong, runs fail."""
    value: str
    """What was found."""
    remedy: str = ""
    """How to mend it; empty where it is ok."""

    @property
    def line(self) -> str:
        """The result for people."""
        return f"{self.state:8} {self.name}: {self.value}{f' ({self.remedy})' * bool(self.remedy)}"


def ok(name: str, value: str) -> Result:
    """Nothing to mend."""
    return Result(name, "ok", value)


def warning(name: str, value: str, remedy: str) -> Result:
    """Runs work, but slowly or not in every case."""
    return Result(name, "warning", value, remedy)


def wrong(name: str, value: str, remedy: str) -> Result:
    """Runs fail."""
    return Result(name, "wrong", value, remedy)


def report(results: Iterable[Result]) -> dict[str, Any]:
    """Results for programs: the worst state of all, and each of them."""
    found = [asdict(result) for result in results]
    states = {result["state"] for result in found}
    worst = next(state for state in ("wrong", "warning", "ok") if state in states | {"ok"})
    return {"state": worst, "checks": found}
