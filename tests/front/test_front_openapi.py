"""What /openapi.json says holds: bodies drawn from its schemas meet no fault of the server, and answers are as it describes.

Half of the bodies are as drawn, most of which mean nothing and are refused; the others are requests that work with one field of
a drawn one. `make fuzz-http` draws 1,000 for each operation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from serving import AppServer

from tokenspeed.runtime.config import ServerConfig

schemathesis = pytest.importorskip("schemathesis")

EXAMPLES = int(os.environ.get("TOKENSPEED_HTTP_EXAMPLES", "15"))
KEY = "a key of the test"
MESSAGES = [{"role": "user", "content": "Hello there"}]
WORKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello there", "max_tokens": 3},
    "/v1/messages": {"model": "smollm2", "messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": MESSAGES},
    "/v1/responses": {"model": "smollm2", "input": "Hello there", "max_output_tokens": 3},
    "/tokenize": {"prompt": "Hello there"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


@pytest.fixture(scope="module")
def documented() -> Iterator[tuple[AppServer, Any]]:
    with AppServer(server=ServerConfig(admin_key=KEY, api_key=KEY), max_model_len=512) as server:
        yield server, schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_answers_are_as_documented(documented: tuple[AppServer, Any]) -> None:
    server, schema = documented
    checks = schemathesis.checks.CHECKS
    # A schema cannot say all that a request must be, nor does this one try to.
    excluded = [checks.get_one("positive_data_acceptance"), checks.get_one("negative_data_rejection")]
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {*WORKS, "/v1/models", "/health", "/internal/abort"}
    answered: set[str] = set()

    def one(data: st.DataObject, case: Any) -> None:
        works = WORKS.get(case.path)
        if works and isinstance(case.body, dict) and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(["", *case.body]))
            case.body = works | ({name: case.body[name]} if name else {})
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {KEY}"}
        response = case.call(timeout=30)
        assert response.status_code < 500, (case.path, case.body, response.text)
        case.validate_response(response, excluded_checks=excluded)
        if response.status_code == 200:
            answered.add(case.path)

    for operation in operations:
        settings(
            max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(given(st.data(), operation.as_strategy())(one))()  # fmt: skip
    assert answered >= {*WORKS, "/v1/models", "/health", "/internal/scheduler", "/internal/flush_cache", "/metrics"}
    assert not server.llm.died.is_set() and server.llm.in_flight == 0
