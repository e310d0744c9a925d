"""Results of checks as lines and as JSON."""

from tokamake.doctor.result import ok, report, warning, wrong


def test_results_as_lines_and_as_json() -> None:
    assert ok("a", "1").line == "ok       a: 1"
    assert wrong("a", "1", "fix it").line == "wrong    a: 1 (fix it)"
    assert report([])["state"] == "ok"
    assert report([ok("a", "1"), warning("b", "2", "c")])["state"] == "warning"
    summary = report([wrong("a", "1", "c"), warning("b", "2", "c")])
    assert summary["state"] == "wrong"
    assert summary["checks"][0] == {"name": "a", "state": "wrong", "value": "1", "remedy": "c"}
