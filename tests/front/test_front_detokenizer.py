"""Ids to text: any grouping, split characters, invalid bytes, stop strings, and which tokens belong to which text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.runtime.detokenizer import Detokenizer, StopMatcher, pieces

# Every byte alone, then words that overlap each other and straddle characters.
WORDS = [
    *[bytes([byte]) for byte in range(256)],
    *[text.encode() for text in ("ab", "abc", "bca", " b", "aab", "日本", "é", "<|im_", "end|>", "end")],
    "日".encode()[:2],
    "日".encode()[2:] + b"a",
]
SPECIAL = len(WORDS)
TABLE = [*WORDS, b"<special>"]
TOKENS = st.lists(st.one_of(st.integers(97, 100), st.integers(256, SPECIAL), st.integers(0, SPECIAL)), max_size=24)
STOPS = st.lists(
    st.one_of(st.text("ab", min_size=1, max_size=3), st.text("abcd 日", min_size=1, max_size=5)), max_size=3
)


def run(
    tokens: list[int], stops: list[str], *, short: bool = False, **options: object
) -> tuple[list[tuple[str, int]], str | None, int]:
    """((text, tokens) of each take and of the end, the stop string met, tokens pushed); `short`: by `whole` where it can be."""
    detokenizer = Detokenizer(TABLE, frozenset({SPECIAL}), stops, **options)  # type: ignore[arg-type]
    taken, pushed = [], 0
    for token in tokens:
        pushed += 1
        if short and (text := detokenizer.whole(token)) is not None:
            taken.append((text, 1))
            continue
        detokenizer.push(token)
        if detokenizer.stopped_by is not None:
            break
        taken.append(detokenizer.take())
    taken.append(detokenizer.finish())
    return taken, detokenizer.stopped_by, pushed


def expected(tokens: list[int], stops: list[str], min_tokens: int = 0) -> tuple[str, str | None]:
    """The whole text, decoded at once and cut at the stop string that ends first."""
    raw = [b"" if token == SPECIAL else TABLE[token] for token in tokens]
    text = b"".join(raw).decode("utf-8", "replace")
    early = "".join(pieces_of(tokens)[:min_tokens])
    for end in range(len(early) + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def pieces_of(tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(TABLE, frozenset({SPECIAL}))
    return [detokenizer.push(token) for token in tokens]


@given(TOKENS, STOPS, st.integers(0, 6))
@settings(max_examples=600, deadline=None)
def test_stream_equals_the_whole(tokens: list[int], stops: list[str], min_tokens: int) -> None:
    taken, stopped, pushed = run(tokens, stops, min_tokens=min_tokens)
    assert ("".join(text for text, _ in taken), stopped) == expected(tokens, stops, min_tokens)
    assert sum(count for _, count in taken) == pushed


@given(TOKENS, STOPS)
@settings(max_examples=300, deadline=None)
def test_the_short_way_gives_the_same_takes(tokens: list[int], stops: list[str]) -> None:
    assert run(tokens, stops, short=True) == run(tokens, stops)


@given(TOKENS, STOPS)
@settings(max_examples=300, deadline=None)
def test_held_text_is_always_the_beginning_of_a_stop_string(tokens: list[int], stops: list[str]) -> None:
    detokenizer = Detokenizer(TABLE, frozenset({SPECIAL}), stops)
    decoded = sent = ""
    for token in tokens:
        decoded += detokenizer.push(token)
        if detokenizer.stopped_by is not None:
            return
        sent += detokenizer.take()[0]
        held = decoded[len(sent) :]
        assert decoded.startswith(sent)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@given(TOKENS, STOPS)
@settings(max_examples=300, deadline=None)
def test_b14_a_token_comes_with_the_text_that_completes_it(tokens: list[int], stops: list[str]) -> None:  # vllm#31135
    taken, _, _ = run(tokens, stops)
    texts = pieces_of(tokens)
    sent = released = 0
    for pushed, (text, count) in enumerate(taken[:-1], 1):
        sent += len(text)
        released += count
        assert len("".join(texts[:released])) <= sent
        if released < pushed:
            assert len("".join(texts[: released + 1])) > sent or incomplete(tokens[: released + 1])


def incomplete(tokens: list[int]) -> bool:
    """Whether the tokens end within a character."""
    raw = b"".join(b"" if token == SPECIAL else TABLE[token] for token in tokens)
    return raw.decode("utf-8", "replace") != "".join(pieces_of(tokens))


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab", max_size=20))
def test_matcher_does_not_depend_on_grouping(patterns: list[str], text: str) -> None:
    whole = StopMatcher(patterns).feed(text)
    matcher, found = StopMatcher(patterns), None
    for at, char in enumerate(text):
        if match := matcher.feed(char):
            found = (at + match[0], match[1])
            break
    assert found == whole


def ids(*texts: str) -> tuple[list[int], list[bytes]]:
    return list(range(len(texts))), [text.encode() for text in texts]


def stream(texts: list[str], stop: list[str], **options: object) -> list[str]:
    tokens, table = ids(*texts)
    detokenizer = Detokenizer(table, stop=stop, **options)  # type: ignore[arg-type]
    out = []
    for token in tokens:
        detokenizer.push(token)
        if detokenizer.stopped_by:
            break
        out.append(detokenizer.take()[0])
    return [*out, detokenizer.finish()[0]]


def test_b01_a_stop_prefix_is_not_sent() -> None:  # vllm#3574
    assert stream(["abc", "DEF", "G", "HI", "J", "k"], ["DEFGHIJ"]) == ["abc", "", "", "", ""]
    assert stream(["abc", "DEF", "G", "HX"], ["DEFGHIJ"]) == ["abc", "", "", "DEFGHX", ""]


def test_b02_a_stop_string_need_not_align_with_tokens() -> None:  # vllm#3672
    assert "".join(stream(["ab", " cd"], ["b c"])) == "a"
    assert "".join(stream(["ab", " cd"], ["b c"], include_stop=True)) == "ab c"


def test_b02_a_special_stop_token_takes_no_text_with_it() -> None:  # vllm#3672
    detokenizer = Detokenizer([b"one", b" two", b"<end>"], frozenset({2}), ["zzz"])
    for token in (0, 1):
        detokenizer.push(token)
    detokenizer.push(2, silent=True)
    assert detokenizer.finish() == ("one two", 3)


def test_b03_an_end_mark_over_two_tokens_is_hidden_whole() -> None:  # TGI#1254
    assert stream(["hi", "<|im_", "end|>"], ["<|im_end|>"]) == ["hi", "", ""]


@pytest.mark.parametrize("tail", [["<|im_end|>"], ["|im_end|>"], ["|im_", "end|>"]])
def test_b04_no_fragment_of_a_held_stop_leaks(tail: list[str]) -> None:  # SharpAI/SwiftLM#126
    head = "a " if tail[0].startswith("<") else "a <"
    assert "".join(stream([head, *tail], ["<|im_end|>"])) == "a "


def test_text_held_for_a_stop_that_does_not_come_is_text() -> None:
    assert stream(["a <", "|im"], ["<|im_end|>"]) == ["a ", "", "<|im"]


def test_b05_a_character_over_two_tokens_comes_whole() -> None:  # exo#1691, ferrox#124
    emoji = "😀".encode()
    detokenizer = Detokenizer([emoji[:2], emoji[2:]])
    detokenizer.push(0)
    assert detokenizer.take() == ("", 0)
    detokenizer.push(1)
    assert detokenizer.take() == ("😀", 2)


def test_b06_invalid_bytes_do_not_stall_the_stream() -> None:  # mattn/tensai#110
    detokenizer = Detokenizer([b"\xff", b"\xfe", b"A"])
    texts = []
    for token in (0, 1, 2):
        detokenizer.push(token)
        texts.append(detokenizer.take()[0])
    assert texts == ["\ufffd", "\ufffd", "A"]


def test_b07_an_end_within_a_character_is_replaced() -> None:  # llama.cpp#14937
    detokenizer = Detokenizer([b"a", "😀".encode()[:3]])
    for token in (0, 1):
        detokenizer.push(token)
    assert detokenizer.take() == ("a", 1)
    assert detokenizer.finish() == ("\ufffd", 1)


def test_b17_two_tokens_in_one_update_give_their_text_once() -> None:  # TensorRT-LLM#3280
    detokenizer = Detokenizer([b"one", b" two", b" three"])
    detokenizer.push(0)
    assert detokenizer.take()[0] == "one"
    detokenizer.push(1)
    detokenizer.push(2)
    assert detokenizer.take() == (" two three", 2)


def test_no_stop_before_min_tokens() -> None:
    assert "".join(stream(["x", "x", "x", "x"], ["x"], min_tokens=2)) == "xx"
    assert "".join(stream(["ab", "ab", "ab"], ["ba"], min_tokens=1)) == "a"


def test_a_match_may_begin_within_one_that_came_too_early() -> None:
    assert "".join(stream(["a", "a", "a", "b"], ["aa"], min_tokens=2)) == "a"


def test_of_two_stop_strings_that_end_together_the_longer_counts() -> None:
    for stop in (["b", "ab"], ["ab", "b"]):
        assert "".join(stream(["x", "ab"], stop)) == "x"


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    detokenizer = Detokenizer([b"a"])
    detokenizer.push(5)
    assert detokenizer.take() == ("", 1)


@given(TOKENS)
@settings(deadline=None)
def test_pieces_join_to_the_text(tokens: list[int]) -> None:
    whole = b"".join(TABLE[token] for token in tokens).decode("utf-8", "replace")
    assert "".join(pieces(TABLE, tokens)) == whole
