"""Classes that a checkpoint names: Megatron's settings are read over, programs are refused."""

import collections
import datetime
import enum
import io
import os
import signal
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_torch_archives import hostile

from tokamake.checkpoint.files import torch_pickles
from tokamake.errors import UserError


class Kind(enum.Enum):
    """A fork's own."""

    FIRST = 1


class Program:
    """Runs something where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


def saved(tmp_path: Path, state: Any) -> Path:
    torch.save(state, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def read(file: Path) -> Any:
    return torch_pickles.read(file, "fetch it again")


@pytest.mark.parametrize(
    "value",
    [
        signal.SIGTERM,
        datetime.timedelta(minutes=10),
        datetime.datetime(2026, 1, 2),
        torch.device("cuda", 1),
        torch.float8_e4m3fnuz,
        torch.bfloat16,
        torch.nn.functional.silu,
        Path("a/b"),
        SimpleNamespace(a=1),
        collections.defaultdict(dict, a=1),
        collections.deque([1, 2]),
        Kind.FIRST,
        [Kind.FIRST, {"kind": Kind.FIRST}],
        Namespace(kind=Kind.FIRST),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stands_in_arguments_does_not_hinder(tmp_path: Path, value: Any) -> None:
    state = {"args": Namespace(before=1, odd=value, hidden_size=64), "model": {"a": torch.ones(3)}}
    found = read(saved(tmp_path, state))
    assert (found["args"].before, found["args"].hidden_size) == (1, 64)
    assert not isinstance(found["args"].odd, type(value)) or isinstance(value, list | Namespace)
    assert found["model"]["a"].shape == (3,)


def test_a_stand_in_says_what_it_stands_for(tmp_path: Path) -> None:
    found = read(saved(tmp_path, {"args": Namespace(kind=Kind.FIRST, signal=signal.SIGTERM)}))
    assert (repr(found["args"].kind), found["args"].kind.name) == (
        "Kind(1)",
        f"{Kind.__module__}.Kind",
    )
    assert repr(found["args"].signal) == "Signals(15)"


@pytest.mark.parametrize("value", [io.BytesIO(b"scales"), None, torch.zeros(3).byte()])
def test_scales_of_transformer_engine_do_not_hinder(tmp_path: Path, value: Any) -> None:
    found = read(saved(tmp_path, {"model": {"a._extra_state": value, "a": torch.ones(2)}}))
    assert found["model"]["a"].shape == (2,)


def test_others_classes_outside_of_arguments_are_refused(tmp_path: Path) -> None:
    inside, outside = Namespace(kind=Kind.FIRST), {"deep": [(Kind.FIRST,)]}
    for state in ({"model": outside}, {"args": inside, "model": outside}, {"args": Kind}, Kind):
        with pytest.raises(UserError, match=rf"a\.pt: holds more .*names {Kind.__module__}\.Kind"):
            read(saved(tmp_path, state))


PROGRAMS = {
    "system": lambda made: Program(os.system, f"touch {made}"),
    "shell": lambda made: Program(subprocess.check_call, ["touch", str(made)]),
    "eval": lambda made: Program(eval, f"open({str(made)!r}, 'w')"),
    "getattr": lambda _: Program(getattr, Program(__import__, "os"), "system"),
    "partial": lambda made: __import__("functools").partial(os.system, f"touch {made}"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("place", ["args", "model"])
def test_a_program_is_refused_and_never_run(tmp_path: Path, name: str, place: str) -> None:
    made = tmp_path / "made"
    program = PROGRAMS[name](made)
    state = {"args": Namespace(a=program)} if place == "args" else {"model": program}
    with pytest.raises(UserError, match="holds more than tensors and plain values") as error:
        read(saved(tmp_path, state))
    assert "\n" not in str(error.value)
    assert not made.exists()


def test_what_is_made_and_thrown_away_is_refused(tmp_path: Path) -> None:
    for content in (b"cfork\nstart\n(tR0}.", b"cargparse\nNamespace\n)\x81cfork\nstart\n(tR0."):
        hostile(tmp_path / "a.pt", content)
        with pytest.raises(UserError, match=r"names fork\.start"):
            read(tmp_path / "a.pt")


def test_a_stand_in_is_of_one_file_alone(tmp_path: Path) -> None:
    # The second file would find what the first has set on a class that both name.
    setting = b"cmegatron\nX\n(N}S'name'\nS'changed'\nstb."
    hostile(tmp_path / "a.pt", setting)
    with pytest.raises(UserError, match="damaged"):
        read(tmp_path / "a.pt")
    hostile(tmp_path / "b.pt", b"cmegatron\nX\n(I1\ntR.")
    found = read(tmp_path / "b.pt")
    assert (found.name, found.arguments) == ("megatron.X", (1,))


def test_numbers_of_8_bit_are_located_as_what_they_are(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4).to(torch.float8_e4m3fn)
    found = read(saved(tmp_path, {"a": whole[1:]}))["a"]
    assert (str(found.dtype), found.shape, found.offset - found.begin) == (
        "torch.float8_e4m3fn",
        (2, 4),
        4,
    )
    assert found.end - found.begin == 12
