"""The short way of plain tokens: the same bytes as by the frame, handed back from where it ends, told before anything else."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from array import array
from collections.abc import Iterator

import pytest
import scripted_core
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import AppServer
from test_front_stream import silent_core
from wires import CHAT, MESSAGES, RESPONSES, request

from tokenspeed._lanes import Lanes
from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.lanes import Lane, token_texts
from tokenspeed.runtime.messages import Deltas, Stats, TokenDelta
from tokenspeed.runtime.metrics import Metrics
from tokenspeed.runtime.outputs import OutputDelta
from tokenspeed.runtime.server.frame import Frame, named_event
from tokenspeed.runtime.tokenizer import Tokenizer, load_tokenizer
from tokenspeed.runtime.transport import InprocClient

WORDS = ['"', "\\", "\n\t\x00\x1f\x7f", " word", "日本", "é", "😀", "\u2028"]
TEXTS = [json.dumps(word, ensure_ascii=False)[1:-1].encode() for word in WORDS]
SPECIAL = len(WORDS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(EngineConfig("smollm2"))
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """(a lane's socket, its reader)."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def opened(fd: int, form: Frame, number: int | None = None, last: float = 0.0) -> Lanes:
    """Lanes of which request 1 has one."""
    lanes = Lanes([*TEXTS, None])
    lanes.open(1, fd=fd, head=form.head, middle=form.middle, end=form.end, number=number, last=last)
    return lanes


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


TOKENS = st.sampled_from([1, 4]).flatmap(
    lambda most: st.lists(st.lists(st.integers(0, SPECIAL - 1), min_size=1, max_size=most), min_size=1, max_size=6)
)


@given(TOKENS, st.one_of(st.none(), st.integers(0, 10**12)))
@settings(max_examples=200, deadline=None)
def test_a_lane_writes_what_the_frame_gives(steps: list[list[int]], number: int | None) -> None:
    sample = named_event({"type": "x", "delta": Frame.HOLE, "logprobs": []})
    form = Frame(sample, number="" if number is None else "sequence_number")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lanes = opened(ours.fileno(), form, number)
        if all(len(tokens) == 1 for tokens in steps):
            pairs = array("q", [number for tokens in steps for number in (1, *tokens)])
            rest, gaps, unsent = lanes.step_plain(pairs.tobytes(), 2.0, TokenDelta)
        else:
            rest, gaps, unsent = lanes.step([TokenDelta(1, tokens) for tokens in steps], 2.0)
        events = [
            form.fill("".join(WORDS[token] for token in tokens), None if number is None else number + at)
            for at, tokens in enumerate(steps)
        ]
        expected = b"".join(map(chunk, events))
        assert theirs.recv(1 << 20) == expected and (rest, unsent) == ([], [])
        told = [event.decode().partition("data: ")[2] for event in events]
        assert all(number is None or json.loads(text)["sequence_number"] == number + i for i, text in enumerate(told))
        assert sum(gaps.values()) == sum(map(len, steps)) and gaps[2.0 / len(steps[0])] >= len(steps[0])
        assert lanes.close(1) == ([token for tokens in steps for token in tokens], len(steps), 2.0)


def test_the_texts_of_a_vocabulary_are_those_of_its_json(tokenizer: Tokenizer) -> None:
    texts = token_texts(tokenizer)
    for token, raw in enumerate(tokenizer.token_bytes):
        text = texts[token]
        if text is not None:
            assert json.loads(b'"' + text + b'"').encode() == raw
        else:
            assert (
                token in tokenizer.special_ids or not raw or b"\xef\xbf\xbd" in raw.decode("utf-8", "replace").encode()
            )


@pytest.mark.parametrize(
    "odd",
    [
        TokenDelta(1, [SPECIAL]),
        TokenDelta(1, [0, SPECIAL + 1]),
        TokenDelta(1, [-1]),
        TokenDelta(1, []),
        TokenDelta(1, [0], "stop"),
        TokenDelta(1, [0], logprobs=[]),
    ],
)
def test_what_is_not_plain_is_handed_back_with_all_behind_it(
    ends: tuple[socket.socket, socket.socket], odd: TokenDelta
) -> None:
    form = Frame(named_event({"type": "x", "delta": Frame.HOLE}))
    lanes = opened(ends[0].fileno(), form)
    first, later, foreign = TokenDelta(1, [3]), TokenDelta(1, [4]), TokenDelta(2, [3])
    assert lanes.step([first, odd, foreign, later], 1.0) == ([odd, foreign, later], {1.0: 1}, [])
    assert lanes.step([later], 2.0)[0] == [later]
    assert ends[1].recv(1 << 20) == chunk(form.fill(" word")) and lanes.close(1) == ([3], 1, 1.0)
    with pytest.raises(ValueError, match="no lane"):
        lanes.close(1)


def test_plain_pairs_of_no_lane_become_deltas(ends: tuple[socket.socket, socket.socket]) -> None:
    form = Frame(named_event({"type": "x", "delta": Frame.HOLE}))
    lanes = opened(ends[0].fileno(), form)
    pairs = array("q", [2, 3, 1, 3, 1, SPECIAL, 1, 4]).tobytes()
    rest, gaps, unsent = lanes.step_plain(pairs, 1.0, TokenDelta)
    assert rest == [TokenDelta(2, [3]), TokenDelta(1, [SPECIAL]), TokenDelta(1, [4])]
    assert (gaps, unsent) == ({1.0: 1}, []) and ends[1].recv(1 << 20) == chunk(form.fill(" word"))


def test_a_socket_without_room_gives_the_rest_back_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    form = Frame(named_event({"type": "x" * 5000, "delta": Frame.HOLE}))
    lanes = opened(ours.fileno(), form)
    deltas = [TokenDelta(1, [3])] * 100
    rest, _, unsent = lanes.step(deltas, 1.0)
    assert rest == [] and unsent and {request for request, _ in unsent} == {1}
    assert lanes.step(deltas[:2], 1.0) == (deltas[:2], {}, [])
    taken = b""
    try:
        while news := theirs.recv(1 << 20):
            taken += news
    except BlockingIOError:
        pass
    assert taken + b"".join(data for _, data in unsent) == chunk(form.fill(" word")) * 100
    assert lanes.close(1)[1] == 100


def test_a_reader_that_is_gone_takes_nothing() -> None:
    ours, theirs = socket.socketpair()
    form = Frame(named_event({"type": "x", "delta": Frame.HOLE}))
    with ours:
        lanes = opened(ours.fileno(), form)
        theirs.close()
        assert lanes.step([TokenDelta(1, [3])], 1.0)[2] == [(1, chunk(form.fill(" word")))]
        with pytest.raises(ValueError, match="already"):
            lanes.open(1, fd=ours.fileno(), head=b"", middle=b"", end=b"", number=None, last=0.0)


async def test_what_took_a_lane_is_told_before_the_end(ends: tuple[socket.socket, socket.socket]) -> None:
    metrics = Metrics("m")
    llm = AsyncLLM(EngineConfig("smollm2", core="inproc"), target=silent_core, metrics=metrics)
    await llm.start()
    await llm.open_lanes()
    assert llm.tokenizer is not None
    client, tokens = llm._client, llm.tokenizer.encode("one two", add_special_tokens=False)
    assert isinstance(client, InprocClient) and len(tokens) == 2
    told: list[OutputDelta] = []
    stream = await llm.submit([5])
    stream.listen(told.append)
    form = Frame(named_event({"type": "x", "delta": Frame.HOLE}))

    async def comes(token: int) -> None:
        client._mailbox.deliver(Deltas([TokenDelta(1, [token])], Stats()))
        for _ in range(5):
            await asyncio.sleep(0)

    await comes(tokens[0])
    stream.forward(Lane(ends[0].fileno(), form.head, form.middle, form.end, None, None, lambda data: None))
    for _ in range(3):
        await comes(tokens[1])
    assert len(told) == 1 and ends[1].recv(1 << 20) == chunk(form.fill(" two")) * 3
    llm.abort_all()
    assert [(delta.text, delta.written, delta.finish_reason) for delta in told] == [
        ("one", 0, None), (" two two two", 3, None), ("", 0, "abort"),
    ]  # fmt: skip
    assert told[1].token_ids == [tokens[1]] * 3 and stream.usage.completion_tokens == 4
    assert 'tokenspeed:generation_tokens_total{model_name="m"} 4.0' in metrics.render().decode()
    await llm.close()


@pytest.mark.parametrize("wire", [CHAT, MESSAGES, RESPONSES, "/v1/completions"])
def test_all_ways_write_the_same_stream(wire: str) -> None:
    """With characters that several tokens make, which end a lane, and special tokens in the middle."""
    text = 'plain words "here", 日本語 😀😀 déjà vu\n<|im_start|> and on and on 🦜.' * 2
    asked = {"prompt": "x", "max_tokens": 400} if wire.endswith("/completions") and wire != CHAT else request(wire)
    asked.pop("tools", None)
    found = []
    for direct in (True, False):
        with AppServer(scripted_core.run_player, ServerConfig(), direct=direct, max_model_len=4096) as server:
            server.play(text)
            body = server.post(wire, {**asked, "stream": True}).raise_for_status().text
            found.append(re.sub(r'"(?:id|item_id|created|created_at|completed_at)":\s*(?:"[^"]*"|\d+)', "", body))
    assert found[0] == found[1]


MARKED = [" word", "<", "a<b", "end ", "tab\t", "line\n", '"', "[x", "日本", "\u3000", " ◁"]


@pytest.mark.parametrize("marks", [b"", b"<", b"<[", "◁".encode()[:1]])
def test_where_marks_are_looked_for_no_token_that_may_begin_one_or_ends_in_white_space_is_plain(marks: bytes) -> None:
    texts = [json.dumps(word, ensure_ascii=False)[1:-1].encode() for word in MARKED]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        lanes = Lanes(texts)
        for token, word in enumerate(MARKED):
            lanes.open(token, fd=ours.fileno(), head=b"", middle=b"", end=b"", number=None, last=0.0, marks=marks)
            rest = lanes.step_plain(array("q", [token, token]).tobytes(), 1.0, TokenDelta)[0]
            has_mark = any(mark in word.encode() for mark in marks)
            assert bool(rest) == (has_mark or word[-1] in ' \t\n"'), word


@pytest.mark.parametrize("wire", [CHAT, MESSAGES, RESPONSES])
def test_all_ways_write_the_same_stream_where_a_tool_may_be_called(wire: str) -> None:
    """Text before, between and after calls, with what only begins like one."""
    call = '<tool_call>\n{"name": "%s", "arguments": {"command": "a < b"}}\n</tool_call>'
    text = f"plain words, a < b and <tool \n\n and on\n{call % 'shell'}\n日本語 then more words {call % 'shell'} and an end 🦜. \n"
    schema = {"type": "object", "properties": {"command": {"type": "string"}}}
    flat = {"name": "shell", "description": "Run."}
    tool = {
        CHAT: {"type": "function", "function": {**flat, "parameters": schema}},
        MESSAGES: {**flat, "input_schema": schema},
        RESPONSES: {"type": "function", **flat, "parameters": schema},
    }[wire]
    asked = {**request(wire), "tools": [tool], "stream": True}
    found = []
    for direct in (True, False):
        with AppServer(scripted_core.run_player, ServerConfig(), direct=direct, max_model_len=4096) as server:
            server.play(text)
            body = server.post(wire, asked).raise_for_status().text
            assert body.count('"shell"') >= 2
            body = re.sub(r"call_[0-9a-f]+|toolu_[0-9a-zA-Z]+", "", body)
            found.append(re.sub(r'"(?:id|item_id|created|created_at|completed_at)":\s*(?:"[^"]*"|\d+)', "", body))
    assert found[0] == found[1]
