"""docs/reference/parallelism.md lists the layouts that tests prove and that checks refuse."""

from tests.support.layout_table import COMMAND, DOCUMENT, all_proved, document


def test_the_tables_are_current() -> None:
    text = document(all_proved())
    assert text == DOCUMENT.read_text(encoding="utf-8"), f"rewrite it: {COMMAND}"
