"""Requests over TLS."""

from pathlib import Path

import pytest

from tests.support.tls_server import tls_server
from tokamake.data.urls import connections
from tokamake.data.urls.connections import Proxies
from tokamake.data.urls.pages import HttpAnswer, PageError, RequestLimits, request


def test_a_certificate_must_be_valid_for_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_server(tmp_path, "localhost") as (port, trusting):

        def answer(host: str) -> HttpAnswer:
            limits = RequestLimits("tokamake", 100, 5, allow_private=True, proxies=Proxies())
            return request(f"https://{host}:{port}/", limits, wants=lambda _: True)

        with pytest.raises(PageError, match="invalid certificate"):
            answer("localhost")
        monkeypatch.setattr(connections, "_tls", lambda: trusting)
        assert answer("localhost").body == b"hello"
        with pytest.raises(PageError, match="invalid certificate"):
            answer("127.0.0.1")
