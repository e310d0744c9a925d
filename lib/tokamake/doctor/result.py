"""The result of a check: name, state, value and, unless it is ok, remedy."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

ResultState = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    state: ResultState
    """warning: runs may be slow or fail in some cases. wrong: runs fail."""
    value: str
    remedy: str = ""
    """How to fix the fault; empty if the state is ok."""

    @property
    def line(self) -> str:
        return f"{self.state:8} {self.name}: {self.value}{f' ({self.remedy})' * bool(self.remedy)}"


def ok(name: str, value: str) -> Result:
    return Result(name, "ok", value)


def warning(name: str, value: str, remedy: str) -> Result:
    return Result(name, "warning", value, remedy)


def wrong(name: str, value: str, remedy: str) -> Result:
    return Result(name, "wrong", value, remedy)


def report(results: Iterable[Result]) -> dict[str, Any]:
    """Return the JSON report: the worst state, and all checks."""
    checks = [asdict(result) for result in results]
    states = {check["state"] for check in checks}
    worst = next(state for state in ("wrong", "warning", "ok") if state in states | {"ok"})
    return {"state": worst, "checks": checks}
