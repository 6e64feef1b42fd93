"""Public faults of output parsers, each by its number and source."""

from __future__ import annotations

import pytest

from tests.front.outputs import called, joined, parse, said, thought
from tokenspeed.runtime.detokenizer import Detokenizer
from tokenspeed.runtime.parsers import CallArguments, CallBegin, CallEnd, Content, Piece, Reasoning, Tool, make_parser

NESTED = '{"n": 3, "s": "x", "o": {"a": [1, [2, {"b": null}]], "t": "}]"}, "e": {}, "l": [], "f": -1.5e3}'
ANY = (Tool("f"), Tool("g"))
JSON_CALLS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "llama3_json": '{{"name": "f", "parameters": {}}}',
    "mistral": '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "gpt-oss": "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
}
WITHOUT_PARAMETERS = {
    "hermes": ['<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
    "llama3_json": ['{"name": "f"}', '{"name": "f", "parameters": {}}'],
    "mistral": ['[TOOL_CALLS][{"name": "f"}]', "[TOOL_CALLS]f[ARGS]{}"],
    "deepseek_v3": ["<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>"],
    "deepseek_v31": ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"],
    "deepseek_v32": ['<｜DSML｜invoke name="f">\n</｜DSML｜invoke>'],
    "kimi_k2": ["<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"],
    "glm45": ["<tool_call>f\n</tool_call>", "<tool_call>f</tool_call>"],
    "qwen3_coder": ["<tool_call>\n<function=f>\n</function>\n</tool_call>"],
    "minimax_m2": ['<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>'],
    "pythonic": ["[f()]"],
    "gpt-oss": ["<|channel|>commentary to=functions.f<|message|>{}<|call|>"],
}


def detokenized(chunks: list[str], stop: list[str], tool: str | None, reasoning: str | None) -> tuple[Piece, ...]:
    """Token by token through the detokenizer, as a request runs."""
    texts = Detokenizer([chunk.encode() for chunk in chunks], stop=stop)
    parser, pieces = make_parser(tool, reasoning, tools=ANY), list[Piece]()
    for token in range(len(chunks)):
        texts.push(token)
        pieces += parser.feed(texts.take()[0])
        if texts.stopped_by:
            break
    pieces += parser.feed(texts.finish()[0])
    return joined([*pieces, *parser.finish()])


@pytest.mark.parametrize("tool", [None, "hermes", "qwen3_coder"])
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
def test_b04_no_fragment_of_a_stop_leaks_while_a_tag_is_held(tool: str | None, reasoning: str | None) -> None:
    """SharpAI/SwiftLM#126."""
    assert detokenized(["hi", " <", "|im_", "end|>", "more"], ["<|im_end|>"], tool, reasoning) == (Content("hi "),)


def test_b18_no_control_text_of_a_call_in_content() -> None:
    """TensorRT-LLM#10651."""
    whole = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
    )
    for end in range(len(whole)):  # cut off anywhere, a mark being one token
        pieces = parse(make_parser("gpt-oss", "gpt_oss", tools=ANY), [whole[:end]])
        texts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning | Content))
        assert texts.split("<")[0] in ("", "a", "ab")
    pieces = parse(make_parser("gpt-oss", "gpt_oss", tools=ANY), [whole])
    assert pieces == (*thought("a"), *said("b"), *called(0, "f", "{}"))


@pytest.mark.parametrize(
    ("tool", "text"), [(tool, text) for tool, texts in WITHOUT_PARAMETERS.items() for text in texts]
)
def test_b37_a_call_without_parameters_has_an_empty_object(tool: str, text: str) -> None:
    """vllm#28806: in whatever chunks."""
    for chunks in ([text], list(text)):
        begin, *rest = parse(make_parser(tool, None, tools=ANY), chunks)
        assert isinstance(begin, CallBegin) and begin.name == "f"
        assert rest == [CallArguments(0, "{}"), CallEnd(0)]


@pytest.mark.parametrize("tool", JSON_CALLS)
def test_b38_b39_arguments_are_the_text_of_the_model_in_every_chunking(tool: str) -> None:
    """vllm#18220 (a first argument that is no string), vllm#10398 (nested values that brackets were added to)."""
    text = JSON_CALLS[tool].format(NESTED)
    for size in (1, 2, 3, 5, 7, 11, len(text)):
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        arguments = [p.text for p in parse(make_parser(tool, None, tools=ANY), chunks) if isinstance(p, CallArguments)]
        assert arguments == [NESTED]


@pytest.mark.parametrize("tool", [*JSON_CALLS, "qwen3_coder", "glm45", "minimax_m2", "pythonic"])
def test_b40_the_name_comes_before_long_arguments_and_these_as_they_come(tool: str) -> None:
    """vllm#30999."""
    heads = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
        "pythonic": "[f(a='",
    }
    head = heads[tool] if tool in heads else JSON_CALLS[tool].split("{}")[0].replace("{{", "{") + '{"a": "'
    parser = make_parser(tool, None, tools=ANY)
    assert any(isinstance(piece, CallBegin) and piece.name == "f" for piece in parser.feed(head))
    if tool != "pythonic":  # whose strings have to be read whole
        assert all(parser.feed("word ") == [CallArguments(0, "word ")] for _ in range(2000))


@pytest.mark.parametrize("tool", [*JSON_CALLS, "qwen3_coder", "glm45", "minimax_m2", "pythonic", "deepseek_v32"])
def test_b42_calls_of_one_turn_are_numbered_from_zero(tool: str) -> None:
    """ollama#7881, ollama#15457."""
    twice = {
        "llama3_json": '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}',
        "pythonic": "[f(), f()]",
        "gpt-oss": WITHOUT_PARAMETERS["gpt-oss"][0] + "<|start|>assistant" + WITHOUT_PARAMETERS["gpt-oss"][0],
    }.get(tool, WITHOUT_PARAMETERS[tool][0] * 2)
    begins = [piece for piece in parse(make_parser(tool, None, tools=ANY), list(twice)) if isinstance(piece, CallBegin)]
    assert [piece.index for piece in begins] == [0, 1]


def test_b50_a_thought_that_the_prompt_opened_is_only_closed() -> None:
    """vllm-mlx#725."""
    for prompt, text in (("<think>", "a</think>b"), ("<think>\n", "a\n</think>\n\nb"), ("", "<think>a</think>b")):
        for chunks in ([text], list(text)):
            assert parse(make_parser(None, "qwen3", prompt=prompt), chunks) == (Reasoning("a"), Content("b"))


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "glm45", "kimi_k2", "minimax"])
def test_b51_both_tags_in_one_chunk(reasoning: str) -> None:
    """litellm#14121."""
    assert parse(make_parser(None, reasoning), ["<think>a</think>b"]) == (*thought("a"), *said("b"))


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "glm45", "kimi_k2", "minimax"])
def test_b52_a_tag_that_is_a_chunk_of_its_own_is_no_content(reasoning: str) -> None:
    """vllm#45687, vllm#34625."""
    parser = make_parser(None, reasoning)
    assert [parser.feed(chunk) for chunk in ("<think>", "a", "</think>", "b")] == [[], thought("a"), [], said("b")]


@pytest.mark.parametrize(
    "reasoning", ["qwen3", "deepseek_r1", "glm45", "kimi_k2", "minimax", "kimi", "mistral", "gpt_oss"]
)
def test_b53_a_thought_that_never_ends_is_a_thought(reasoning: str) -> None:
    """dynamo#14991."""
    begin = {"kimi": "◁think▷", "mistral": "[THINK]", "gpt_oss": "<|channel|>analysis<|message|>"}.get(
        reasoning, "<think>"
    )
    for cut in ("a b", "a b<"):
        text = begin + cut
        assert parse(
            make_parser("gpt-oss" if reasoning == "gpt_oss" else "hermes", reasoning, tools=ANY), list(text)
        ) == (Reasoning(cut),)
