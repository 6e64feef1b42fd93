"""Calls that a chat template writes are the calls that the family's parser reads: history and output agree.

The templates are small ones of each notation, and those of real models where they lie beside the repository
(../shared/chat_templates). Both are rendered by transformers, then by us.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.front.outputs import TOOLS, parse
from tokenspeed.runtime.parsers import TOOL_PARSERS, CallArguments, CallBegin, Content, Reasoning, families, make_parser
from tokenspeed.runtime.parsers.writing import calls_text, tools_text

FOLDER = Path(__file__).parents[3] / "shared" / "chat_templates"
REFUSED = {"kimi-k2-thinking"}  # changes a list, which transformers' sandbox forbids
REAL = sorted(path for path in FOLDER.glob("*.jinja") if path.stem not in REFUSED)
WITHOUT_CALLS = {"smollm2"}

ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Zürich\n<b>"x"\\ </tool>', "days": 3, "where": {"lat": [1.5, None, {"a": "}"}]}}),
    ("now", {}),
    ("get_weather", {"city": "7", "live": False, "units": None}),
]
_LOOP = "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}CALLS<|end|>"
_REST = (
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template(calls: str) -> str:
    each = "{% for c in m.tool_calls %}{% set f = c.function %}" + calls + "{% endfor %}"
    return _LOOP.replace("CALLS", each) + _REST


SMALL: dict[str, str] = {
    "hermes": template(
        '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    ),
    "qwen3_coder": template(
        "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "glm45": template(
        "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    ),
    "minimax_m2": template(
        '\n<minimax:tool_call>\n<invoke name="{{ f.name }}">{% for k, v in f.arguments.items() %}'
        '\n<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>{% endfor %}'
        "\n</invoke>\n</minimax:tool_call>"
    ),
    "deepseek_v31": template(
        "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"
        "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"
    ),
    "deepseek_v3": template(
        "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n"
        "```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}"
    ),
    "kimi_k2": template(
        "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>functions.{{ f.name }}:"
        "{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
        "{% if loop.last %}<|tool_calls_section_end|>{% endif %}"
    ),
    "mistral": template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "gpt-oss": template(
        "<|end|><|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}<|call|>"
    ),
}


def conversation(calls: list[tuple[str, dict[str, Any]]], content: str) -> list[dict[str, Any]]:
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": content, "tool_calls": made},
    ]


def rendered(source: str, messages: list[dict[str, Any]], *, generation: bool) -> str:
    tools = [
        {"type": "function", "function": {"name": tool.name, "description": "d", "parameters": tool.parameters}}
        for tool in TOOLS
    ]
    (text,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=generation, bos_token="<s>", eos_token=""
    )
    return text


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("content", ["One moment.", ""])
def test_calls_of_a_small_template_are_read(family: str, content: str) -> None:
    messages = conversation(ARGUMENTS, content)
    prompt = rendered(SMALL[family], messages[:1], generation=True)
    text = rendered(SMALL[family], messages, generation=False).removeprefix(prompt).removesuffix("<|end|>")
    assert families("", SMALL[family])[0] == family or family == "gpt-oss"
    pieces = parse(make_parser(family, None, tools=TOOLS, prompt=prompt), [text])
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    assert list(zip(names, arguments)) == ARGUMENTS
    assert [piece.text for piece in pieces if isinstance(piece, Content)] == ([content] if content else [])


@pytest.mark.skipif(not REAL, reason="no ../shared/chat_templates")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_calls_of_a_real_template_are_read(path: Path) -> None:
    source = path.read_text("utf-8")
    tool, reasoning = families("", source)
    if path.stem in WITHOUT_CALLS:
        assert (tool, reasoning) == ("hermes", None)
        return
    calls = ARGUMENTS[:1] if tool == "gpt-oss" else ARGUMENTS
    messages = conversation(calls, "" if tool == "mistral" else "One moment.")
    prompt = rendered(source, messages[:1], generation=True)
    whole = rendered(source, messages, generation=False)
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
    parser = make_parser(tool, reasoning, tools=TOOLS, prompt=prompt[:shared])
    pieces = parse(parser, [whole[shared:]])
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    assert list(zip(names, arguments)) == calls
    said = "".join(piece.text for piece in pieces if isinstance(piece, Content | Reasoning))
    assert "moment" in said or tool == "mistral"


@pytest.mark.parametrize("family", [*TOOL_PARSERS])
def test_calls_that_we_write_are_read(family: str) -> None:
    calls = ARGUMENTS[:1] if family in ("gpt-oss", "openai") else ARGUMENTS
    pieces = parse(make_parser(family, None, tools=TOOLS), [calls_text(family, calls)])
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    assert list(zip(names, arguments)) == calls
    assert not [piece for piece in pieces if isinstance(piece, Content)]
    assert calls_text(family, [("function_name", {"parameter_name": "value"})]) in tools_text(family, [{"name": "f"}])
