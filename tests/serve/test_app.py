"""The whole application against requests that a program makes from its OpenAPI schema."""

import hypothesis
import pytest

from tests.support.served import Served


def test_pages_load_nothing_from_other_hosts(server: Served) -> None:
    page = server.ask("GET", "/").content.decode()
    assert "http" not in page.replace("http-equiv", "")
    for path in ("/docs", "/redoc"):
        assert server.ask("GET", path).status == 404


def test_all_paths_are_in_the_schema(server: Served) -> None:
    schema = server.ask("GET", "/openapi.json").json
    assert {"/api", "/v1/completions", "/v1/chat/completions", "/v1/models", "/healthz"} <= {
        *schema["paths"]
    }
    assert server.ask("GET", "/healthz").json == {"status": "ok"}


@pytest.mark.extra("oracles", "schemathesis")
def test_no_request_makes_the_server_fail(server: Served) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: list[int] = []

    for operation in schema.get_all_operations():

        @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
        @hypothesis.given(case=operation.ok().as_strategy())
        def ask(case: object) -> None:
            reply = case.call(base_url=server.url)
            statuses.append(reply.status_code)
            assert reply.status_code < 500, reply.text

        ask()
    assert {200, 400} <= {*statuses}
    assert server.ask("GET", "/healthz").status == 200
