"""Notes for the executors, and texts of errors of the system."""

from pathlib import Path

import pytest

from tokamake import errors
from tokamake.errors import TemporaryError, UserError


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the files that executors and restarts name."""
    for variable in ("FAILURE", "RESTART", "FAULTY_HOSTS"):
        name = getattr(errors, f"{variable}_VARIABLE")
        monkeypatch.setenv(name, str(tmp_path / variable.lower()))
    return tmp_path


def written(notes: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in notes.iterdir()}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("wrong"), {"failure": "", "restart": ""}),
        (TemporaryError("full"), {"restart": ""}),  # a new job may not meet it
    ],
)
def test_errors_prevent_what_would_fail_again(
    notes: Path, error: Exception, expected: dict[str, str]
) -> None:
    errors.note_failure(error)
    assert written(notes) == expected


def test_a_wanted_end_is_not_retried(notes: Path) -> None:
    errors.note_wanted_end()
    assert written(notes) == {"failure": "it was asked to stop, so there is no retry"}


def test_each_report_adds_faulty_hosts(notes: Path) -> None:
    errors.note_faulty_hosts([])
    errors.note_faulty_hosts(["n2"])
    errors.note_faulty_hosts(["n1", "n3"])
    assert written(notes) == {"faulty_hosts": "n2\nn1\nn3\n"}


def test_outside_of_a_job_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in (errors.FAILURE_VARIABLE, errors.FAULTY_HOSTS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    errors.note_failure(UserError("wrong"))
    errors.note_faulty_hosts(["n1"])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device", "a/b"), "a/b: No space left on device"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("torn"), "torn"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_errors_of_the_system_name_the_file_and_the_reason(error: OSError, text: str) -> None:
    assert errors.of_system(error) == text


def test_passwords_of_addresses_are_hidden() -> None:
    text = "http://me:secret@a/ https://secret@b socks5h://me:secret@c:1 hf://gpt2@main"
    expected = "http://***@a/ https://***@b socks5h://***@c:1 hf://gpt2@main"
    assert str(UserError(text)) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("my.yaml: train.steps: unknown key", "command line: train.steps: unknown key"),
        ("my.yaml: train: split: '0,1': nothing", "command line: train: split: '0,1': nothing"),
        ("my.yaml: model.architecture: a.yaml:x=1: no", "command line: model.architecture: a.yaml"),
        ("my.yaml: train.size 17 is no multiple", "command line: train.size 17 is no multiple"),
        ("my.yaml: train.all 9, not a multiple of size 2", "command line: train.all 9, not a"),
        ("my.yaml: train.all 9 is odd; set size", "my.yaml: train.all 9 is odd"),
        ("my.yaml: data.all 9, not a multiple of size 2", "my.yaml: data.all 9, not"),
        ("my.yaml: modle: unknown key; no", "command line: modle: unknown key"),
        # Settings of the file, and names that only begin alike.
        ("my.yaml: seed: 'x': no number", "my.yaml: seed"),
        ("my.yaml: train.steps_more: no", "my.yaml: train.steps_more"),
        ("run a: train.steps: no", "run a: train.steps: no"),
    ],
)
def test_mistakes_of_the_command_line_are_named_so(message: str, expected: str) -> None:
    overrides = ["train.steps", "train.split", "train.size", "model.x", "modle.x"]
    with pytest.raises(UserError) as error, errors.naming_overrides("my.yaml", overrides):
        raise UserError(message)
    assert str(error.value).startswith(expected)


def test_divisors_are_a_remedy() -> None:
    assert errors.divisor(12) == "one of 1, 2, 3, 4, 6, 12"
    assert errors.divisor(11008) == "a divisor of 11008"
