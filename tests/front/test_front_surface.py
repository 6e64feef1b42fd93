"""What surrounds the wire formats: tokens and text, request ids, keys, other origins, limits, control calls."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import scripted_core
from serving import AppServer, lines
from wires import CHAT, MESSAGES, RESPONSES

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.server import gate

MESSAGE = [{"role": "user", "content": "one two"}]
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def keyed() -> Iterator[AppServer]:
    config = ServerConfig(api_key="user", admin_key="admin", allowed_origins="https://a.example, http://b.example")
    with AppServer(scripted_core.run_player, config) as server:
        yield server


def test_tokens_of_a_text_and_back(server: AppServer) -> None:
    found = server.post("/tokenize", {"prompt": "one two <|im_end|>", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == scripted_core.MAX_LEN and found["token_strs"][-1] == "<|im_end|>"
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "one two <|im_end|>"}


def test_tokens_of_a_conversation(server: AppServer) -> None:
    body = {"messages": MESSAGE, "model": "smollm2"}
    usage = server.post(CHAT, {**body, "max_tokens": 1}).json()["usage"]
    assert server.post("/tokenize", body).json()["count"] == usage["prompt_tokens"]
    bare = server.post("/tokenize", {**body, "add_generation_prompt": False}).json()["count"]
    assert bare < usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGE}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens.0"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_has_no_tokens_or_text_is_named(server: AppServer, path: str, body: Any, param: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_every_response_bears_the_request_s_id(server: AppServer) -> None:
    given = server.post(CHAT, {"messages": MESSAGE, "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for wrong in ({}, {"X-Request-Id": "two words"}, {"X-Request-Id": "x" * 200}):
        ids = {server.post("/nowhere", {}, headers=wrong).headers["x-request-id"] for _ in range(2)}
        assert len(ids) == 2 and all(name.startswith("req_") for name in ids)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    done = client.chat.completions.create(model="smollm2", messages=MESSAGE, max_tokens=1)  # pyright: ignore[reportArgumentType]
    assert (done._request_id or "").startswith("req_")


def test_keys_in_either_vendor_s_header(keyed: AppServer) -> None:
    for headers in ({"Authorization": "Bearer user"}, {"X-Api-Key": "user"}):
        assert httpx.get(keyed.url + "/v1/models", headers=headers).status_code == 200
    for path in (CHAT, MESSAGES, RESPONSES, "/tokenize", "/detokenize"):
        for headers in ({}, {"X-Api-Key": "admin"}, {"Authorization": "Basic user"}):
            assert keyed.post(path, {}, headers=headers).status_code == 401, path


def test_control_needs_the_admin_s_key(keyed: AppServer, server: AppServer) -> None:
    flush = "/internal/flush_cache"
    for headers in ({}, {"Authorization": "Bearer user"}):
        assert keyed.post(flush, headers=headers).status_code == 401
    assert "pages" in keyed.post(flush, headers=ADMIN).json()
    refused = server.post(flush)
    assert refused.status_code == 403 and "--admin-key" in refused.json()["error"]["message"]


def test_weights_are_replaced_by_a_control_call(keyed: AppServer) -> None:
    update = "/internal/update_weights"
    assert keyed.post(update, {"path": "fits"}, headers={"X-Api-Key": "user"}).status_code == 401
    assert keyed.post(update, {"path": "fits", "abort": True}, headers=ADMIN).json() == {"seconds": 0.5}
    refused = keyed.post(update, {"path": "does not"}, headers=ADMIN)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "path"
    assert keyed.post(update, {}, headers=ADMIN).status_code == 400


@pytest.mark.parametrize("by", ["request", "answer", "all"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_request_is_ended_by_its_id_or_its_answer_s(keyed: AppServer, path: str, by: str) -> None:
    scripted_core.PLAYS.append([scripted_core.SLOW] * 4000)
    body = {"messages": MESSAGE} if path == CHAT else {"prompt": "x"}
    headers = {"X-Api-Key": "user", "X-Request-Id": "to-end"}
    stream = {**body, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", keyed.url + path, json=stream, headers=headers, timeout=30) as response:
        chunks = lines(response)
        first = next(chunks)
        name = {"request": {"request_id": "to-end"}, "answer": {"request_id": first["id"]}, "all": {"abort_all": True}}
        assert keyed.post("/internal/abort", name[by], headers=ADMIN).json() == {"aborted": 1}
        reasons = [
            choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]
        ]
    assert reasons == ["abort"]
    assert keyed.post("/internal/abort", {"request_id": "to-end"}, headers=ADMIN).json() == {"aborted": 0}
    assert keyed.post("/internal/abort", {}, headers=ADMIN).status_code == 400


def test_pages_of_other_origins(keyed: AppServer, server: AppServer) -> None:
    asks = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "x-api-key",
    }
    allowed = httpx.options(keyed.url + CHAT, headers=asks)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = httpx.options(keyed.url + CHAT, headers={**asks, "Origin": "https://evil.example"})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    answer = httpx.get(keyed.url + "/v1/models", headers={"Origin": "http://b.example"})
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "http://b.example"
    assert "access-control-allow-origin" not in httpx.get(server.url + "/v1/models", headers=asks).headers


def test_headers_are_bounded(server: AppServer) -> None:
    answer = httpx.get(server.url + "/v1/models", headers={"X-Much": "y" * gate.MAX_HEADER_BYTES})
    assert answer.status_code == 431 and str(gate.MAX_HEADER_BYTES) in answer.json()["error"]["message"]
    assert httpx.get(server.url + "/v1/models", headers={"X-Much": "y" * 1000}).status_code == 200


def test_several_names_of_one_model() -> None:
    with AppServer(server=ServerConfig(served_model_name="mine, gpt-5-codex")) as server:
        assert [model["id"] for model in httpx.get(server.url + "/v1/models").json()["data"]] == ["mine", "gpt-5-codex"]
        for name in ("mine", "gpt-5-codex"):
            body = {"model": name, "messages": MESSAGE, "max_tokens": 1}
            assert server.post(CHAT, body).json()["model"] == "mine"
        assert server.post(CHAT, {"model": "other", "messages": MESSAGE}).status_code == 404


HISTORY: list[tuple[str, list[dict[str, Any]]]] = [
    ("b43", [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "cut'}}]}]),
    ("b43", [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1"}}]}]),
    ("b44", [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]}]),
    *[("b45", [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}], **content}])
      for content in ({"content": None}, {"content": ""}, {})],
    *[("b46", [{"role": role, "content": content, "tool_call_id": "a"}]) for role in ("assistant", "tool", "user", "system")
      for content in ([], [{"type": "text", "text": "x"}], [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])],
    ("b47", [{"role": "developer", "content": "late"}, {"role": "system", "content": "later"}]),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "between"), HISTORY)
def test_b43_to_b47_a_history_that_clients_send_is_taken(
    server: AppServer, fault: str, between: list[dict[str, Any]]
) -> None:
    body = {"messages": [*MESSAGE, *between, *MESSAGE], "max_tokens": 1}
    for stream in (False, True):
        response = server.post(CHAT, {**body, "stream": stream})
        assert response.status_code == 200, (fault, response.text)


def test_b09_other_encodings_and_half_requests_end_no_server(server: AppServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for raw in (b"\xff\xfe\x00", b"GET / HTTP/9\r\n\r\n", b"POST /v1/messages HTTP/1.1\r\nContent-Length: 10\r\n\r\n{"):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(raw)
            sock.shutdown(socket.SHUT_WR)
    assert httpx.get(server.url + "/health").status_code == 200
