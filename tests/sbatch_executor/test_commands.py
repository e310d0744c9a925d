"""Options of sbatch that depend on what happened to earlier jobs."""

import pytest

from snakemake_executor_plugin_sbatch.commands import avoid


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--nodes=2",), ("--nodes=2", "--exclude=n1,n2")),
        (("--exclude=n7", "--nodes=2"), ("--nodes=2", "--exclude=n1,n2,n7")),
        (("--exclude", "n[7-9]", "--qos=q"), ("--qos=q", "--exclude=n1,n2,n[7-9]")),
        (("-x", "n7", "-xn8"), ("--exclude=n1,n2,n7,n8",)),
        (("--exclusive", "-x"), ("--exclusive", "--exclude=n1,n2")),
    ],
)
def test_one_option_names_all_hosts_to_leave_out(
    arguments: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert avoid(arguments, ["n1", "n2"]) == expected
