"""How many random texts a tokenizer encodes."""

import pytest


@pytest.fixture(params=[1, pytest.param(5, marks=pytest.mark.grid)], ids=["few", "many"])
def times(request: pytest.FixtureRequest) -> int:
    """Factor of the number of random texts: `make test-all` has more."""
    factor: int = request.param
    return factor
