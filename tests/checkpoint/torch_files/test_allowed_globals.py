"""Classes of Megatron's settings get stand-ins; globals that could run code are refused."""

import collections
import datetime
import enum
import io
import os
import pickle
import signal
import subprocess
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from tests.checkpoint.torch_files.test_archive_writer import hostile
from tests.support.python_pickles import PYTHONS, Python
from tokamake.checkpoint.deepspeed import zero_reader
from tokamake.checkpoint.torch_files import pickle_reader
from tokamake.checkpoint.torch_files.allowed_globals import value_of
from tokamake.errors import UserError


class Kind(enum.Enum):
    """A fork's own."""

    FIRST = 1


class Outer:
    """Has classes within."""

    class Kind(enum.Enum):
        """Below protocol 4, pickles look it up in the outer class."""

        FIRST = 1

    class Inner:
        """The same."""


class Program:
    """Runs something where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


def saved(tmp_path: Path, state: Any, python: Python | None = None, protocol: int = 2) -> Path:
    """A file of torch.save, as a version of Python writes it; None: that at hand."""
    module = pickle if python is None else python.module()
    torch.save(state, tmp_path / "a.pt", pickle_module=module, pickle_protocol=protocol)
    return tmp_path / "a.pt"


def read(file: Path) -> Any:
    return pickle_reader.read(file, "fetch it again")


@pytest.mark.parametrize(
    "value",
    [
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
        Outer.Inner,
        Outer.Inner(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unknown_classes_within_arguments_are_accepted(tmp_path: Path, value: Any) -> None:
    check_arguments(saved(tmp_path, arguments(value)), value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    "value",
    [
        signal.SIGTERM,
        Kind.FIRST,
        [Kind.FIRST, {"kind": Kind.FIRST}],
        Namespace(kind=Kind.FIRST),
        Outer.Kind.FIRST,
    ],
    ids=lambda value: type(value).__name__,
)
def test_enums_of_every_python_are_accepted(
    tmp_path: Path, value: Any, python: str, protocol: int
) -> None:
    check_arguments(saved(tmp_path, arguments(value), PYTHONS[python], protocol), value)


def arguments(value: Any) -> dict[str, Any]:
    """Contents of a file of Megatron whose arguments have an odd value."""
    args = Namespace(before=1, odd=value, hidden_size=64)
    return {"args": args, "model": {"a": torch.ones(3)}}


def check_arguments(file: Path, value: Any) -> None:
    """Check that such a file is read, with stand-ins for objects that are no plain values."""
    state = read(file)
    assert (state["args"].before, state["args"].hidden_size) == (1, 64)
    assert not isinstance(state["args"].odd, type(value)) or isinstance(
        value, list | Namespace | type
    )
    assert state["model"]["a"].shape == (3,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_stand_in_prints_the_name_of_its_class(tmp_path: Path, protocol: int) -> None:
    here, state = Kind.__module__, arguments([Kind.FIRST, signal.SIGTERM, Outer.Kind.FIRST])
    for python, shown in (
        ("3.11.2", [("FIRST", f"{here}.Kind.FIRST"), ("SIGTERM", "signal.SIGTERM")]),
        ("3.11.7", [("Kind(1)", f"{here}.Kind"), ("Signals(15)", "signal.Signals")]),
    ):
        values = read(saved(tmp_path, state, PYTHONS[python], protocol))["args"].odd
        assert [(repr(each), each.name) for each in values[:2]] == shown
        assert values[2].name == shown[0][1].replace("Kind", "Outer.Kind")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("python", PYTHONS)
def test_enum_members_are_read_by_value_and_by_name(
    tmp_path: Path, python: str, protocol: int
) -> None:
    for stage in (ZeroStageEnum.optimizer_states, ZeroStageEnum.gradients, ZeroStageEnum.weights):
        file = saved(tmp_path, {"zero_stage": stage, "plain": 1}, PYTHONS[python], protocol)
        state = read(file)
        members = {each.name: each.value for each in ZeroStageEnum}
        assert value_of(state["zero_stage"], members) == stage.value
        assert value_of(state["plain"], members) == 1
        assert zero_reader._stage(state) == stage.value
    assert {each.name: each.value for each in ZeroStageEnum} == zero_reader._STAGES


@pytest.mark.parametrize("value", [io.BytesIO(b"scales"), None, torch.zeros(3).byte()])
def test_scales_of_transformer_engine_are_accepted(tmp_path: Path, value: Any) -> None:
    state = read(saved(tmp_path, {"model": {"a._extra_state": value, "a": torch.ones(2)}}))
    assert state["model"]["a"].shape == (2,)


@pytest.mark.parametrize("python", ["3.11.2", "3.11.7"])
@pytest.mark.parametrize("member", [Kind.FIRST, Outer.Kind.FIRST])
def test_unknown_classes_outside_of_arguments_are_refused(
    tmp_path: Path, member: enum.Enum, python: str
) -> None:
    inside, outside, kind = Namespace(kind=member), {"deep": [(member,)]}, type(member)
    for state in ({"model": outside}, {"args": inside, "model": outside}, {"args": kind}, kind):
        with pytest.raises(UserError, match=rf"a\.pt: holds more .*names {Kind.__module__}\."):
            read(saved(tmp_path, state, PYTHONS[python]))


PROGRAMS = {
    "system": lambda marker: Program(os.system, f"touch {marker}"),
    "shell": lambda marker: Program(subprocess.check_call, ["touch", str(marker)]),
    "eval": lambda marker: Program(eval, f"open({str(marker)!r}, 'w')"),
    "getattr": lambda _: Program(getattr, Program(__import__, "os"), "system"),
    "partial": lambda marker: __import__("functools").partial(os.system, f"touch {marker}"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("place", ["args", "model"])
def test_code_is_refused_and_does_not_run(tmp_path: Path, name: str, place: str) -> None:
    marker = tmp_path / "made"
    program = PROGRAMS[name](marker)
    state = {"args": Namespace(a=program)} if place == "args" else {"model": program}
    with pytest.raises(UserError, match="holds more than tensors and plain values") as error:
        read(saved(tmp_path, state))
    assert "\n" not in str(error.value)
    assert not marker.exists()


def looked_up(of: bytes, name: bytes, module: bytes = b"builtins") -> bytes:
    """Codes that call getattr."""
    return b"c" + module + b"\ngetattr\n(" + of + name + b"tR"


STAND_IN = b"cmegatron.enums\nA\n"
LOOKED_UP = {
    "class": (looked_up(STAND_IN, b"V__class__\n"), "the attribute '__class__'"),
    "function": (looked_up(STAND_IN, b"V__init__\n"), "the attribute '__init__'"),
    "of Python 2": (looked_up(STAND_IN, b"V__init__\n", b"__builtin__"), "'__init__'"),
    "several lines": (looked_up(STAND_IN, b"X\x03\x00\x00\x00a\nb"), r"'a\\nb'"),
    "method": (looked_up(b"cpathlib\nPath\n", b"Vtouch\n"), r"names pathlib\.Path\.touch"),
    "method with dots": (b"\x80\x04Vpathlib\nVPath.touch\n\x93", r"names pathlib\.Path\.touch"),
    "dots": (looked_up(STAND_IN, b"Va.b\n"), "the attribute 'a.b'"),
    "nothing": (looked_up(STAND_IN, b"V\n"), "the attribute ''"),
    "bytes": (looked_up(STAND_IN, b"C\x01a"), "the attribute b'a'"),
    "stand-in": (looked_up(STAND_IN + b"(tR", b"Va\n"), "of an object that is no class"),
    "dtype": (
        looked_up(b"ctorch\nfloat32\n", b"Vtorch\n"),
        "of an object that is no class",
    ),
    "rebuilding": (looked_up(b"ctorch._utils\n_rebuild_tensor_v2\n", b"Va\n"), "no class"),
    "dictionary": (
        looked_up(b"ccollections\nOrderedDict\n", b"Vmro\n"),
        "of an object that is no class",
    ),
    "set": (looked_up(b"cbuiltins\nset\n", b"V__subclasses__\n"), "of an object that is no class"),
    "namespace": (looked_up(b"cargparse\nNamespace\n", b"Vmro\n"), "of an object that is no class"),
    "text": (looked_up(b"Va\n", b"Vformat\n"), "of an object that is no class"),
    "itself": (looked_up(b"cbuiltins\ngetattr\n", b"V__call__\n"), "of an object that is no class"),
    "module": (looked_up(b"cbuiltins\n__import__\n", b"V__self__\n"), "names builtins.__import"),
    "program": (looked_up(b"cos\nsystem\n", b"V__call__\n"), r"names os\.system"),
    "signals": (b"csignal\nalarm\n", r"names signal\.alarm"),
    "more of signals": (b"csignal\nSIGTERM.kill\n", r"names signal\.SIGTERM\.kill"),
    "handlers": (b"csignal\nsignal\n", r"names signal\.signal"),
    "setattr": (b"cbuiltins\nsetattr\n", r"names builtins\.setattr"),
    "default": (b"cbuiltins\ngetattr\n(" + STAND_IN + b"Va\nNtR", "damaged"),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_getattr_reaches_nothing(tmp_path: Path, name: str) -> None:
    content, message = LOOKED_UP[name]
    for pickled in (content + b".", b"(lp0\ncargparse\nNamespace\n)\x81}Va\n" + content + b"sba."):
        hostile(tmp_path / "a.pt", pickled)
        with pytest.raises(UserError, match=message) as error:
            read(tmp_path / "a.pt")
        assert str(tmp_path / "a.pt") in str(error.value)
        assert "\n" not in str(error.value)


def test_results_of_getattr_run_nothing(tmp_path: Path) -> None:
    # Names of Megatron's modules may be anything; what stands for them keeps what it is given.
    system = looked_up(looked_up(STAND_IN, b"Vos\n"), b"Vsystem\n")
    marker = tmp_path / "made"
    hostile(tmp_path / "a.pt", system + f"(Vtouch {marker}\ntR.".encode())
    stand_in = read(tmp_path / "a.pt")
    assert (stand_in.name, stand_in.arguments) == (
        "megatron.enums.A.os.system",
        (f"touch {marker}",),
    )
    assert not marker.exists()


def test_an_unknown_class_that_is_made_and_dropped_is_refused(tmp_path: Path) -> None:
    for content in (b"cfork\nstart\n(tR0}.", b"cargparse\nNamespace\n)\x81cfork\nstart\n(tR0."):
        hostile(tmp_path / "a.pt", content)
        with pytest.raises(UserError, match=r"names fork\.start"):
            read(tmp_path / "a.pt")


def test_each_file_has_its_own_stand_ins(tmp_path: Path) -> None:
    # The second file would find what the first has set on a class that both name.
    setting = b"cmegatron\nX\n(N}S'name'\nS'changed'\nstb."
    hostile(tmp_path / "a.pt", setting)
    with pytest.raises(UserError, match="damaged"):
        read(tmp_path / "a.pt")
    hostile(tmp_path / "b.pt", b"cmegatron\nX\n(I1\ntR.")
    stand_in = read(tmp_path / "b.pt")
    assert (stand_in.name, stand_in.arguments) == ("megatron.X", (1,))


def test_8_bit_tensors_are_located_with_their_dtype(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4).to(torch.float8_e4m3fn)
    located = read(saved(tmp_path, {"a": whole[1:]}))["a"]
    assert (str(located.dtype), located.shape, located.offset - located.begin) == (
        "torch.float8_e4m3fn",
        (2, 4),
        4,
    )
    assert located.end - located.begin == 12
