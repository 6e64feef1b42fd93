"""Wrong requests get a 4xx that names the fault, in OpenAI's form, and the server goes on; so do lost clients."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import scripted_core
from serving import AppServer, lines

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.server import protocol, sse
from tokenspeed.runtime.server.chat import request as chat_request

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]
HELD = [scripted_core.STALL, 5]


@pytest.fixture(autouse=True)
def lives(server: AppServer) -> Any:
    """After every test the server answers."""
    yield
    body = {"prompt": "one two", "max_tokens": 2}
    assert server.post(TEXT, body).json()["choices"][0]["text"] == "one two"


def check(answer: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message of an error of this form."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        # sglang#28153
        *[("temperature", value) for value in (float("nan"), float("inf"), -1, 1e9, "1", True, [])],
        *[("top_p", value) for value in (0, 2, "x")],
        *[("top_k", value) for value in (-5, 1.5)],
        # vllm#16529, sglang#7670
        *[("logit_bias", v) for v in ({"191222": -100}, {"abc": 1}, {"1": 1e9}, {"-1": 1}, {"1": "x"}, [], {"²": 1})],
        *[("n", value) for value in (0, 1000, "2")],
        *[("stop", value) for value in ("", ["a", ""], [1], 5, ["a"] * 65, "a" * 1025)],
        ("stop_token_ids", [1] * 1025),
        *[("seed", value) for value in (2**63, 2**70, 1.5)],
        *[("priority", value) for value in (2**31, -(2**40), 1.5)],
        *[("cache_salt", value) for value in ("a\ud800", 5)],
        ("stop", ["a", "\udc00"]),
        *[("max_tokens", value) for value in (-1, "5", 1.5)],
        *[("min_tokens", value) for value in (-1, 5000)],
        *[("stop_token_ids", value) for value in ([-1], [10**6], ["x"])],
        *[("allowed_token_ids", value) for value in ([], [10**6])],
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        *[("model", value) for value in (7, "\ud800")],
    ],
)
def test_b19_b22_b31_a_wrong_field_is_named(server: AppServer, path: str, name: str, value: Any) -> None:  # vllm#53357
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    content = json.dumps({**body, name: value})
    answer = httpx.post(server.url + path, content=content, headers={"Content-Type": "application/json"})
    message = check(answer, 400)
    param = answer.json()["error"]["param"]
    assert param.split(".")[0] == name or (name, value) == ("min_tokens", 5000)
    assert name in message or (name, value) == ("min_tokens", 5000)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": 3}, "logprobs"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "messages"),
        (CHAT, {"messages": [{**MESSAGES[0], "tool_calls": 5}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": [{"role": {}, "content": "x"}]}, "messages[0].role"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "x"]}, None),
        (TEXT, {"prompt": None}, None),
        (TEXT, {"prompt": [10**6]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_body_is_named(server: AppServer, path: str, body: dict[str, Any], param: str | None) -> None:
    check(server.post(path, body), 400, param)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "content",
    [
        b"{broken",
        b"",
        b"[1]",
        b"null",
        b'"x"',
        b"NaN",
        b'{"prompt": "x", "messages": [], "any": NaN}',
        b'{"prompt": "x", "messages": [], "any": {"deep": [1, -Infinity]}}',
        b'{"prompt": "x", "messages": [], "user": "\\ud800"}',
        b'{"prompt": "x", "messages": [], "any": {"\\udfff": 1}}',
        b'{"prompt": "x", "messages": [], "any": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"prompt": "x", "messages": [], "any": ' + b'{"a":' * 200 + b"1" + b"}" * 201,
        b'{"prompt": "\xed\xa0\x80", "messages": []}',
        '{"prompt": "你好", "messages": [{"role": "user", "content": "你好"}]}'.encode("gbk"),  # llama.cpp#6396
        b'{"prompt": "\xff\xfe", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"any": ' * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_request(server: AppServer, path: str, content: bytes) -> None:
    for headers in ({"Content-Type": "application/json"}, {}):
        check(httpx.post(server.url + path, content=content, headers=headers), 400, code="invalid_body")


def test_a_body_of_another_content_type_is_told_which(server: AppServer) -> None:
    answer = httpx.post(server.url + TEXT, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in check(answer, 400, code="invalid_body")


def test_what_is_unusual_and_right_is_taken(server: AppServer) -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    body = {"prompt": "one \U0001f600", "max_tokens": 1, "user": "\U0001f600", "metadata": {"deep": deep}}
    for content in (json.dumps(body), json.dumps(body, ensure_ascii=False).encode()):  # a pair of escapes, and not
        assert httpx.post(server.url + TEXT, content=content).json()["choices"][0]["text"] == "one"
    kwargs = {"self": 1, "context": 2, "args": [3]}
    body = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": kwargs, "priority": -5, "seed": -(2**63)}
    assert server.post(CHAT, body).status_code == 200


def test_more_prompts_than_are_ever_taken_are_wrong(server: AppServer) -> None:
    message = check(server.post(TEXT, {"prompt": ["x"] * 5000, "max_tokens": 1}), 400, "prompt")
    assert "5000 prompts" in message and " 2304 " in message


def test_b08_errors_echo_nothing(server: AppServer) -> None:  # llama.cpp#9195, #9210
    mark = "SECRET\u00ff\u2028"
    wrong: list[dict[str, Any]] = [
        {"prompt": [mark]},
        {"stop": [mark, 1]},
        {"seed": mark},
        {"logit_bias": {mark: "x"}},
        {"logit_bias": {mark: 1}},
        {mark: float("nan")},
        {"user": {mark: "\ud800"}},
        {"tools": [mark]},
        {"messages": [{"role": mark, "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": mark}]}]},
    ]
    for more in wrong:
        path, body = (CHAT, {}) if "messages" in more else (TEXT, {"prompt": "x"})
        answer = httpx.post(server.url + path, content=json.dumps({**body, **more, "max_tokens": -1}))
        check(answer, 400)
        assert "SECRET" not in answer.text
    for path, value in ((TEXT, -7), (TEXT, 700)):  # a number stands beside its limit
        assert str(value) in check(server.post(path, {"prompt": "x", "max_tokens": value}), 400, "max_tokens")
    huge = server.post(TEXT, {"prompt": "x", "max_tokens": 10**400})
    assert len(check(huge, 400, "max_tokens")) < 100
    tokens = list(range(100, 400))  # pieces of characters, asked back
    answer = server.post(TEXT, {"prompt": tokens, "echo": True, "max_tokens": 1, "logprobs": 1, "stream": False})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(("path", "key"), [(CHAT, "messages"), (TEXT, "prompt")])
def test_b32_b35_a_prompt_beyond_the_context(server: AppServer, path: str, key: str) -> None:  # vllm#12600, #36789
    text = "word " * 3 * scripted_core.MAX_LEN
    value: Any = [{"role": "user", "content": text}] if key == "messages" else text
    for more in ({}, {"max_tokens": None}, {"max_tokens": 5}, {"stream": True}):
        message = check(server.post(path, {key: value, **more}), 400, code="context_length_exceeded")
        assert " 512 " in message and " 15" in message and "-" not in message


def test_b33_b34_a_prompt_of_the_whole_context(server: AppServer) -> None:  # vllm#16445, lm-eval#2880
    prompt = [5, 6] * (scripted_core.MAX_LEN // 2)
    for limit in (1, None):
        message = check(server.post(TEXT, {"prompt": prompt, "max_tokens": limit}), 400, code="context_length_exceeded")
        assert " 512 " in message
    scored = server.post(TEXT, {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}).json()
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == scripted_core.MAX_LEN
    message = check(server.post(TEXT, {"prompt": [5] * 8, "max_tokens": 2045}), 400)  # vllm#33418
    assert all(number in message for number in (" 512 ", " 8 ", " 2045"))


def test_unknown_models_paths_and_methods(server: AppServer) -> None:
    for answer in (
        server.post(TEXT, {"prompt": "x", "model": "gpt-4"}),
        server.post(CHAT, {"messages": MESSAGES, "model": "gpt-4"}),
        httpx.get(server.url + "/v1/models/gpt-4"),
    ):
        check(answer, 404, "model", "model_not_found")
    check(httpx.get(server.url + "/v1/nothing"), 404)
    check(httpx.get(server.url + TEXT), 405)
    with pytest.raises(openai.NotFoundError, match="no such model"):
        openai.OpenAI(base_url=server.url + "/v1", api_key="x").completions.create(model="gpt-4", prompt="x")


@pytest.mark.parametrize("name", sorted(protocol.REFUSED))
def test_a_field_that_does_not_work_is_refused_unless_it_asks_for_nothing(server: AppServer, name: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    check(server.post(CHAT, {**body, name: [{"some": "thing"}]}), 400, name, "unsupported_parameter")
    for nothing in (None, *protocol.REFUSED[name]):
        assert server.post(CHAT, {**body, name: nothing}).status_code == 200


@pytest.mark.parametrize("value", [0, 1, 20, 21, -1, scripted_core.VOCAB])
def test_b30_log_probabilities_of_a_prompt_are_asked_for_by_echo(server: AppServer, value: int) -> None:  # vllm#41031
    check(server.post(TEXT, {"prompt": "x", "prompt_logprobs": value}), 400, "prompt_logprobs", "unsupported_parameter")


def test_echo_is_no_field_of_chat(server: AppServer) -> None:
    check(server.post(CHAT, {"messages": MESSAGES, "echo": True}), 400, "echo")
    assert server.post(CHAT, {"messages": MESSAGES, "echo": False, "max_tokens": 1}).status_code == 200


def test_fields_without_effect_and_unknown_ones_are_tolerated(server: AppServer) -> None:
    more = {name: {"any": "thing"} for name in protocol.ACCEPTED_WITHOUT_EFFECT}
    body = {"messages": MESSAGES, "max_tokens": 1, "brand_new_field": [1], **more}
    assert server.post(CHAT, body).status_code == 200


def test_every_field_of_the_documentation(server: AppServer) -> None:
    from tokenspeed.runtime.server.fields import markdown

    page = Path(__file__).parents[2] / "docs" / "http-api.md"
    assert page.read_text("utf-8").endswith(markdown())


@pytest.mark.parametrize(("path", "cls"), [(CHAT, chat_request.ChatRequest), (TEXT, protocol.CompletionRequest)])
def test_null_is_the_default_of_every_field(server: AppServer, path: str, cls: Any) -> None:
    body = dict.fromkeys(cls.model_fields) | {"messages": MESSAGES, "prompt": "x"}
    assert server.post(path, {**body, "max_tokens": 1}).status_code == 200


def test_an_open_last_message(server: AppServer) -> None:
    conversation = [*MESSAGES, {"role": "assistant", "content": "I say"}]
    body = {"messages": conversation, "continue_final_message": True, "max_tokens": 1}
    closed = server.post(CHAT, {**body, "continue_final_message": None}).json()["usage"]["prompt_tokens"]
    assert server.post(CHAT, body).json()["usage"]["prompt_tokens"] < closed
    check(server.post(CHAT, {**body, "add_generation_prompt": True}), 400, "continue_final_message")


def test_a_long_body_is_refused_before_it_is_read() -> None:
    with AppServer(server=ServerConfig(max_body_bytes=2000)) as server:
        big = json.dumps({"prompt": "x" * 3000}).encode()
        check(httpx.post(server.url + TEXT, content=big), 413)

        def pieces() -> Any:
            for at in range(0, len(big), 500):
                yield big[at : at + 500]

        check(httpx.post(server.url + TEXT, content=pieces()), 413)
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_b64_a_full_queue_is_a_429_with_retry_after() -> None:  # vllm#2901, #18826
    with AppServer(max_num_seqs=1, max_queued_requests=1) as server:
        streams = [open_stream(server) for _ in range(2)]
        wait(lambda: server.core_stats()["running"] == 2)
        answer = server.post(TEXT, {"prompt": "x", "max_tokens": 1})
        check(answer, 429, code="rate_limit_exceeded")
        assert float(answer.headers["Retry-After"]) > 0
        for stream in streams:
            stream.close()
        wait(lambda: server.core_stats()["running"] == 0)
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200
        with open_stream(server):
            wait(lambda: server.core_stats()["running"] == 1)
            # Of a list of prompts all are taken or none.
            check(server.post(TEXT, {"prompt": [HELD] * 4}), 429, code="rate_limit_exceeded")
            assert server.core_stats()["running"] == 1


def test_b65_a_request_that_waited_too_long_is_a_503() -> None:  # sglang#17143
    with AppServer(queue_timeout=0.05) as server:
        answer = server.post(TEXT, {"prompt": HELD})
        check(answer, 503, code="queue_timeout")
        assert float(answer.headers["Retry-After"]) > 0
        last = server.post(TEXT, {"prompt": HELD, "stream": True}).text.strip().split("\n\n")[-1]
        assert "waited" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_a_request_may_limit_its_time(server: AppServer) -> None:
    body = {"prompt": [scripted_core.SLOW, 5, 6], "max_tokens": 400, "timeout": 0.1}
    (choice,) = server.post(TEXT, body).json()["choices"]
    assert choice["finish_reason"] == "abort"
    for wrong in (0, -1, "1", 1e300):
        check(server.post(TEXT, {**body, "timeout": wrong}), 400, "timeout")


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_core_is_told(server: AppServer, stream: bool) -> None:
    body = {"prompt": [scripted_core.FAIL, 5, 6], "max_tokens": 9}
    if not stream:
        assert "scripted failure" in check(server.post(TEXT, body), 500)
        return
    text = server.post(TEXT, {**body, "stream": True}).text
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == "scripted failure" and "[DONE]" not in text


# ---- lost clients --------------------------------------------------------------------------------------------------


def open_stream(server: AppServer, prompt: list[Any] = HELD, **more: Any) -> socket.socket:
    """A connection on which a request has been sent and nothing read."""
    body = json.dumps({"prompt": prompt, "max_tokens": 400, "stream": True, **more}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_is_noticed_without_a_token(server: AppServer, stream: bool, n: int) -> None:
    before = server.core_stats()["aborts"]  # sglang#36333, #37833
    sock = open_stream(server, stream=stream, n=n)
    wait(lambda: server.core_stats()["running"] == n)
    sock.close()
    wait(lambda: server.core_stats()["running"] == 0)
    assert server.core_stats()["aborts"] == before + n
    wait(lambda: server.life.active == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_all_its_prompts_with_it(server: AppServer, stream: bool) -> None:
    sock = open_stream(server, [HELD, HELD, HELD], stream=stream)
    wait(lambda: server.core_stats()["running"] == 3)
    sock.close()
    wait(lambda: server.core_stats()["running"] == 0)


def test_a_client_that_leaves_in_the_middle(server: AppServer) -> None:
    before = server.core_stats()["aborts"]
    body = {"prompt": [scripted_core.SLOW, 5], "max_tokens": 400, "stream": True}
    with httpx.stream("POST", server.url + TEXT, json=body) as response:
        next(lines(response))
    wait(lambda: server.core_stats()["running"] == 0)
    assert server.core_stats()["aborts"] == before + 1


def test_b67_normal_ends_abort_nothing(server: AppServer) -> None:  # ROCm/ATOM#1589
    before = server.core_stats()["aborts"]
    with httpx.Client() as client:
        for stream in (True, False):
            for _ in range(50):
                body = {"prompt": "a b c", "max_tokens": 3, "stream": stream, "n": 2}
                assert client.post(server.url + TEXT, json=body).status_code == 200
    assert server.core_stats()["aborts"] == before


def test_pings_fill_a_silence(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.05)
    with open_stream(server) as sock:
        received = b""
        while received.count(b": ping\n\n") < 2:
            received += sock.recv(4096)
    assert b"data:" not in received
    wait(lambda: server.core_stats()["running"] == 0)
