"""Model outputs of every family, by hand, with what they mean; and the checks that every parser must pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tokenspeed.runtime.parsers import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputParser,
    Piece,
    Reasoning,
    Tool,
    make_parser,
)

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
            "units": {"type": ["string", "null"]},
            "live": {"type": "boolean"},
        },
    },
)
CLOCK = Tool("now")
TOOLS = (WEATHER, CLOCK)


@dataclass(frozen=True)
class Sample:
    """An output of a family, and the pieces that it is."""

    name: str
    tool: str | None
    reasoning: str | None
    text: str
    pieces: tuple[Piece, ...]
    prompt: str = ""
    tools: tuple[Tool, ...] = TOOLS

    def parser(self) -> OutputParser:
        return make_parser(self.tool, self.reasoning, tools=self.tools, prompt=self.prompt)


def thought(text: str) -> list[Piece]:
    return [Reasoning(text)]


def said(text: str) -> list[Piece]:
    return [Content(text)]


def called(index: int, name: str, arguments: str, call_id: str | None = None) -> list[Piece]:
    return [
        CallBegin(index, name, call_id),
        *([CallArguments(index, arguments)] if arguments else []),
        CallEnd(index),
    ]


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces of one kind that follow one another as one."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, CallArguments | Content | Reasoning) and type(last) is type(piece):
            out[-1] = replace(last, text=last.text + piece.text)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            out.append(piece)
    return tuple(out)


def parse(parser: OutputParser, chunks: Iterable[str]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for chunk in chunks:
        pieces += parser.feed(chunk)
    return joined([*pieces, *parser.finish()])


def all_splits(text: str) -> Iterator[list[str]]:
    """Character by character, every two-way split, and three-way splits around every place."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
        for width in (1, 2, 5, 13, 40):
            if at + width < len(text):
                yield [text[:at], text[at : at + width], text[at + width :]]


def sample(name: str, tool: str | None, reasoning: str | None, text: str, *pieces: list[Piece], **more: str) -> Sample:
    return Sample(name, tool, reasoning, text, tuple(piece for group in pieces for piece in group), **more)  # pyright: ignore[reportArgumentType]


PARIS = '{"city": "Paris </tool_call> \\"q\\" é\\u00e9", "where": {"lat": [1, {"x": "}"}]}}'
ROME = '{"city": "Rome"}'

SAMPLES: tuple[Sample, ...] = (
    # hermes, qwen3
    sample("hermes plain", "hermes", None, "Hello, <b>world</b>!\n", said("Hello, <b>world</b>!\n")),
    sample(
        "hermes thought, content, two calls",
        "hermes",
        "qwen3",
        "<think>\nLook it up.\n</think>\n\nOne moment.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>',
        thought("Look it up."),
        said("One moment."),
        called(0, "get_weather", PARIS),
        called(1, "now", "{}"),
    ),
    sample(
        "hermes arguments first, as a string, null",
        "hermes",
        None,
        f'<tool_call>{{"arguments": {ROME}, "name": "get_weather"}}</tool_call>'
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"\\u00e9\\ud83d\\ude00\\\\n\\"}"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
        called(0, "get_weather", ROME),
        called(1, "get_weather", '{"city": "é😀\\n"}'),
        called(2, "now", "{}"),
    ),
    sample(
        "hermes arguments first that are no object",
        "hermes",
        None,
        '<tool_call>{"arguments": "{\\"city\\": \\"Rome\\"}", "name": "get_weather"}</tool_call>'
        '<tool_call>{"arguments": null, "name": "now"}</tool_call>',
        called(0, "get_weather", ROME),
        called(1, "now", "{}"),
    ),
    sample(
        "hermes arguments first that are no JSON: they are shown as written",
        "hermes",
        None,
        '<tool_call>{"arguments": nullify, "name": "now"}</tool_call><tool_call>{"arguments": 5, "name": "now"}</tool_call>',
        called(0, "now", "nullify"),
        called(1, "now", "5"),
    ),
    sample(
        "hermes two objects in one block, text behind",
        "hermes",
        None,
        '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}\n</tool_call>\nDone.',
        called(0, "now", "{}"),
        called(1, "now", "{}"),
        said("Done."),
    ),
    sample(
        "hermes malformed",
        "hermes",
        None,
        'The <tool_call> tag <tool_call>\n{"nam": 1}\n</tool_call> and {"name": "now"}',
        said('The <tool_call> tag <tool_call>\n{"nam": 1}\n</tool_call> and {"name": "now"}'),
    ),
    sample(
        "hermes stops to be JSON",
        "hermes",
        None,
        '<tool_call>{"name": "get_weather", "arguments": {"city": "x" ; 1}}</tool_call> ok',
        called(0, "get_weather", '{"city": "x" '),
        said("; 1}} ok"),
    ),
    sample(
        "hermes cut in arguments",
        "hermes",
        None,
        'a\n<tool_call>{"name": "get_weather", "arguments": {"city": "Pa\\',
        said("a"),
        called(0, "get_weather", '{"city": "Pa\\'),
    ),
    sample("hermes cut in a header", "hermes", None, 'a\n<tool_call>\n{"na', said('a\n<tool_call>\n{"na')),
    sample("hermes cut in a mark", "hermes", None, "a\n<tool_", said("a\n<tool_")),
    # reasoning
    sample("qwen3 without a thought", "hermes", "qwen3", "\n\n a <think>b</think>", said("\n\n a <think>b</think>")),
    sample(
        "qwen3 opened by the prompt",
        None,
        "qwen3",
        "a\n\nb\n</think>\n\nc\n",
        thought("a\n\nb"),
        said("c\n"),
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    sample(
        "qwen3 closed by the prompt", None, "qwen3", "c</think>", said("c</think>"), prompt="<think>\n\n</think>\n\n"
    ),
    sample(
        "qwen3 a call ends the thought",
        "hermes",
        "qwen3",
        '<think>a\n<tool_call>{"name": "now"}</tool_call>',
        thought("a"),
        called(0, "now", "{}"),
    ),
    sample("qwen3 cut thought", "hermes", "qwen3", "<think>a </thin", thought("a </thin")),
    sample("deepseek_r1 implied", None, "deepseek_r1", "a</think>b", thought("a"), said("b")),
    sample("deepseek_r1 both tags", None, "deepseek_r1", "<think>a</think>b", thought("a"), said("b")),
    sample("deepseek_r1 closed by the prompt", None, "deepseek_r1", "b", said("b"), prompt="<｜Assistant｜></think>"),
    sample("kimi", None, "kimi", "◁think▷a◁/think▷b", thought("a"), said("b")),
    sample("mistral thought", "mistral", "mistral", "[THINK]a[/THINK]b", thought("a"), said("b")),
    # qwen3_coder
    sample(
        "qwen3_coder",
        "qwen3_coder",
        None,
        'I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"é"\\ <b>\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=where>\n{"lat": 1.5}\n</parameter>\n'
        "<parameter=units>\nnull\n</parameter>\n<parameter=live>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        said("I look."),
        called(
            0,
            "get_weather",
            '{"city": "Paris\\n\\"é\\"\\\\ <b>", "days": 3, "where": {"lat": 1.5}, "units": null, "live": true}',
        ),
        called(1, "now", "{}"),
    ),
    sample(
        "qwen3_coder tags left out",
        "qwen3_coder",
        None,
        "<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\nmany\n</parameter>\n</tool_call>\nok",
        called(0, "get_weather", '{"city": "Rome", "days": "many"}'),
        said("ok"),
    ),
    sample(
        "qwen3_coder empty string, stray text",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\nso:\n<parameter=city>\n\n</parameter>\n</function>\n</tool_call>",
        called(0, "get_weather", '{"city": ""}'),
        said("so:"),
    ),
    sample(
        "qwen3_coder malformed",
        "qwen3_coder",
        None,
        "a <tool_call>\n<parameter=x>\n</tool_call> <function=a b>",
        said("a <tool_call>\n<parameter=x>\n</tool_call> <function=a b>"),
    ),
    sample(
        "qwen3_coder cut in a value",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar\n</para",
        called(0, "get_weather", '{"city": "Par\\n</para'),
    ),
    # glm45
    sample(
        "glm45",
        "glm45",
        "glm45",
        "\n<think>a</think>\nb\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n</tool_call></arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        thought("a"),
        said("b"),
        called(0, "get_weather", '{"city": "Rome\\n</tool_call>", "days": 3}'),
        called(1, "now", "{}"),
    ),
    sample(
        "glm45 without line feeds",
        "glm47",
        None,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        called(0, "get_weather", ROME),
    ),
    sample("glm45 malformed", "glm45", None, "a <tool_call> is a tag\n", said("a <tool_call> is a tag\n")),
    # minimax_m2, deepseek_v32
    sample(
        "minimax_m2",
        "minimax_m2",
        "minimax",
        'a\n</think>\n\nb\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="where">{"lat": [1]}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        thought("a"),
        said("b"),
        called(0, "get_weather", '{"city": "Rome", "where": {"lat": [1]}}'),
        called(1, "now", "{}"),
        prompt="]~b]ai\n<think>\n",
    ),
    sample(
        "deepseek_v32",
        "deepseek_v32",
        "deepseek_r1",
        'a</think>b\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="more" string="false">[3]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        thought("a"),
        said("b"),
        called(0, "get_weather", '{"city": "3", "more": [3]}'),
        prompt="<｜Assistant｜><think>",
    ),
    # deepseek_v3, v31
    sample(
        "deepseek_v3",
        "deepseek_v3",
        None,
        "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        said("a"),
        called(0, "get_weather", PARIS),
        called(1, "now", "{}"),
    ),
    sample(
        "deepseek_v31",
        "deepseek_v31",
        "deepseek_r1",
        f"a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        said("a"),
        called(0, "get_weather", PARIS),
        called(1, "now", "{}"),
        prompt="<｜Assistant｜><think></think>",
    ),
    sample(
        "deepseek_v31 a call ends the thought",
        "deepseek_v31",
        "deepseek_r1",
        "a<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        thought("a"),
        called(0, "now", "{}"),
    ),
    # kimi_k2
    sample(
        "kimi_k2",
        "kimi_k2",
        "kimi_k2",
        "<think>a</think>b<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        thought("a"),
        said("b"),
        called(0, "get_weather", PARIS, "functions.get_weather:0"),
        called(1, "now", "{}", "functions.now:1"),
    ),
    sample(
        "kimi_k2 malformed",
        "kimi_k2",
        None,
        "a<|tool_call_begin|>functions.now:0<|tool_call_end|>",
        said("a<|tool_call_begin|>functions.now:0<|tool_call_end|>"),
    ),
    # mistral
    sample(
        "mistral array",
        "mistral",
        None,
        f'a[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}, '
        '{"name": "now", "arguments": {}}]',
        said("a"),
        called(0, "get_weather", PARIS),
        called(1, "now", "{}"),
    ),
    sample(
        "mistral names",
        "mistral",
        None,
        f"a[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}",
        said("a"),
        called(0, "get_weather", PARIS),
        called(1, "now", "{}", "abcdefghi"),
    ),
    sample("mistral malformed", "mistral", None, "a[TOOL_CALLS][1, 2]", said("a[TOOL_CALLS][1, 2]")),
    # llama3_json
    sample(
        "llama3_json",
        "llama3_json",
        None,
        f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"type": "function", "name": "now", "parameters": {{}}}}',
        called(0, "get_weather", PARIS),
        called(1, "now", "{}"),
    ),
    sample(
        "llama3_json after its tag",
        "llama3_json",
        None,
        f'a <|python_tag|>{{"name": "get_weather", "parameters": {ROME}}}',
        said("a"),
        called(0, "get_weather", ROME),
    ),
    sample(
        "llama3_json an answer in JSON",
        "llama3_json",
        None,
        ' {"name": "Ada", "parameters": {}}\n',
        said(' {"name": "Ada", "parameters": {}}\n'),
    ),
    # pythonic
    sample(
        "pythonic",
        "pythonic",
        None,
        '[get_weather(city=\'Pa\\\'ris\', days=-3, where={"lat": [1, None]}, live=True, units="""a\n"b\n"""), now()]',
        called(
            0,
            "get_weather",
            '{"city": "Pa\'ris", "days": -3, "where": {"lat": [1, null]}, "live": true, "units": "a\\n\\"b\\n"}',
        ),
        called(1, "now", "{}"),
    ),
    sample(
        "pythonic half a surrogate pair",
        "pythonic",
        None,
        "[get_weather(city='\\ud83d', units='\\ud83d\\ude00')]",
        called(0, "get_weather", '{"city": "\ufffd", "units": "😀"}'),
    ),
    sample("pythonic a list", "pythonic", None, "[1, 2, now()]", said("[1, 2, now()]")),
    sample(
        "pythonic malformed value",
        "pythonic",
        None,
        "[get_weather(city=town(3, 4), days=2)]",
        called(0, "get_weather", '{"city": "town(3, 4)", "days": 2}'),
    ),
    # gpt-oss
    sample(
        "harmony",
        "gpt-oss",
        "gpt_oss",
        "<|channel|>analysis<|message|>a\n<|end|><|start|>assistant<|channel|>commentary<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "<|call|>"}<|call|>',
        thought("a\n"),
        said("b"),
        called(0, "get_weather", '{"city": "<|call|>"}'),
    ),
    sample(
        "harmony recipient in the role",
        "openai",
        None,
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}<|call|><|start|>assistant"
        "<|channel|>final<|message|>c<|return|>",
        called(0, "get_weather", ROME),
        said("c"),
    ),
    sample("harmony without channels", "gpt-oss", "gpt_oss", "plain text", said("plain text")),
    sample("harmony cut in a header", "gpt-oss", "gpt_oss", "<|channel|>fin"),
    sample(
        "harmony cut in a call",
        "gpt-oss",
        "gpt_oss",
        '<|channel|>commentary to=functions.now<|message|>{"a',
        called(0, "now", '{"a'),
    ),
)
