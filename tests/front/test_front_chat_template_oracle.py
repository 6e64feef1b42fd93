"""Prompts equal transformers' for conversations of every kind, by small templates and by those of real models.

The real ones lie beside the repository (../shared/chat_templates), where they are present.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.front.test_front_parsers_round_trip import REAL, SMALL
from tokenspeed.runtime.chat_messages import Abilities
from tokenspeed.runtime.chat_template import ChatTemplate, load_template
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.tokenizer import Tokenizer

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "é <b>"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": {"type": "object"}}},
]
USER = {"role": "user", "content": "How is the weather in Rome?"}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich <x>", "days": [1, None]}},
}
RESULT = {"role": "tool", "content": '{"t": 20}', "tool_call_id": "abcdefghi", "name": "get_weather"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Fine.\n"}, {"role": "user", "content": " And in\nOslo? "}],
    "thoughts": [USER, {"role": "assistant", "content": "Fine.", "reasoning_content": "Rome is warm."}, USER],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
    "thought and call": [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [CALL]},
        RESULT,
    ],
    "call and answer": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        RESULT,
        {"role": "assistant", "content": "20 degrees."},
        {"role": "user", "content": "Thanks."},
    ],
}
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "thinking": False},
    {"enable_thinking": True, "thinking": True},
]
TEMPLATES = {**SMALL, **{path.stem: path.read_text("utf-8") for path in REAL}}


def oracle(source: str, messages: list[dict[str, Any]], tools: Any, **variables: Any) -> str | None:
    """What transformers renders; None where the template refuses."""
    try:
        (text,), _ = render_jinja_template(
            [copy.deepcopy(messages)],
            tools=tools,
            chat_template=source,
            **{"add_generation_prompt": True},
            **SPECIALS,
            **variables,
        )
    except Exception:
        return None
    return text


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As clients send it: arguments are text, an empty content is null."""
    messages = copy.deepcopy(messages)
    for message in messages:
        message["content"] = message["content"] or None
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_those_of_transformers(name: str) -> None:
    template, source, compared = ChatTemplate(TEMPLATES[name], SPECIALS), TEMPLATES[name], 0
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            for variables in VARIABLES:
                wanted = oracle(source, messages, tools, **variables)
                assert wanted is not None
                assert template.render(messages, tools=tools, **variables) == wanted
                assert template.render(as_sent(messages), tools=tools, **variables) == wanted
                compared += 1
    assert compared == len(CONVERSATIONS) * 6


PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMS = PLAIN.replace("m.content }}", "m.content | trim }}")


@pytest.mark.parametrize("name", [*TEMPLATES, "plain", "trims"])
@pytest.mark.parametrize("said", ["I think ", "I think", "a\n\nI think\n"])
def test_a_message_is_left_open_where_transformers_leaves_it(name: str, said: str) -> None:
    source = {**TEMPLATES, "plain": PLAIN, "trims": TRIMS}[name]
    messages = [USER, {"role": "assistant", "content": said}]
    given: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    wanted = None
    try:
        (wanted,), _ = render_jinja_template([copy.deepcopy(messages)], chat_template=source, **given, **SPECIALS)
    except Exception:
        with pytest.raises(RequestError):
            ChatTemplate(source, SPECIALS).render(messages, **given)
        return
    assert ChatTemplate(source, SPECIALS).render(messages, **given) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools is none }} {{ documents is none }} {{ tools is defined }}",
        "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}",
        "{{ {'b': 'é<', 'a': {'c': [1]}} | tojson(ensure_ascii=True, indent=2, separators=(',', ':'), sort_keys=True) }}",
        "{{ {'b': 'é<'} | tojson(false, 1) }}",
        "{{ dict(a=1, **{'b': 2}) }} {{ dict.fromkeys(['a'], 3) }}",
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}",
        "{{ messages[0].reasoning_content }} {{ messages[0].thinking }} {{ messages[0].reasoning }}",
        "{{ strftime_now('%Y-%m-%d') }} {{ messages | tojson }}",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}",
    ],
)
def test_what_a_template_sees_is_what_transformers_shows_it(source: str) -> None:
    documents = [{"title": "T", "text": "x"}]
    for content in ("hi", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]):
        for thought in ({}, {"reasoning": "r"}, {"thinking": "t"}, {"reasoning_content": "c", "reasoning": "r"}):
            messages = [{"role": "assistant", "content": content, **thought}]
            for more in ({}, {"documents": documents}):
                wanted = oracle(source, messages, None, **more)
                if "p.text" in source or not isinstance(content, list):
                    assert ChatTemplate(source, SPECIALS).render(messages, **more) == wanted


def test_the_template_for_tools_is_taken_where_tools_are_given(tmp_path: Path) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ tools | length }}")
    template = load_template(EngineConfig(model="smollm2"), Tokenizer.from_directory(tmp_path))
    assert template is not None and "plain" in template.source and "tools" in template.source
    assert template.render([USER]) == template.render([USER], tools=[]) == "plain"
    assert template.render([USER], tools=TOOLS) == "tools: 2"


def asked(template: str, *messages: dict[str, Any], **more: Any) -> str:
    return ChatTemplate(template, SPECIALS).render(list(messages), **more)


def test_ids_of_calls_are_shortened_for_a_template_that_counts_their_letters() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9') }}"
        "{% endif %}{{ c.id }} {{ c.function.arguments | tojson }} {% endfor %}{% if m.tool_call_id %}"
        "{% if m.tool_call_id | length != 9 %}{{ raise_exception('9') }}{% endif %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    call = {**CALL, "id": "call_01234"}
    text = asked(template, USER, {"role": "assistant", "tool_calls": [call]}, {**RESULT, "tool_call_id": "call_01234"})
    first, *_, last = text.split()
    assert first == last and len(first) == 9 and first.isalnum()
    kept = asked(template, USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT)
    assert kept.split()[0] == kept.split()[-1] == "abcdefghi"


def test_arguments_are_text_for_a_template_that_joins_them() -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '[' + c.function.arguments + ']' }}{% endfor %}{% endfor %}"
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        assert asked(template, USER, {"role": "assistant", "tool_calls": [call]}) == '[{"a": "é"}]'


STRICT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("broken", ['{"path": "/x', "[1]", "no", "[" * 100_000])
def test_b43_broken_past_arguments_never_refuse_a_conversation(broken: str) -> None:
    """vllm#43995, vllm#48922: by a template that takes objects alone, they are one value of an object."""
    call = {**CALL, "function": {"name": "f", "arguments": broken}}
    message = {"role": "assistant", "tool_calls": [CALL, call]}
    assert asked(STRICT, USER, message).endswith(f"arguments={broken};")
    for name in sorted(TEMPLATES.keys() - {"smollm2"}):  # which shows no calls
        text = asked(TEMPLATES[name], USER, message, RESULT, RESULT, tools=TOOLS)
        assert broken[:4] in text.replace('\\"', '"'), name


def test_every_call_of_a_message_is_shown_by_a_template_that_shows_one() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.content }}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }} {% elif m.role == 'tool' %}={{ m.content }} {% endif %}{% endfor %}"
    )
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(3)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in (2, 0, 1)]
    message = {"role": "assistant", "content": "so ", "tool_calls": calls}
    assert asked(template, USER, message, *results) == "so f0{} =r0 f1{} =r1 f2{} =r2 "
    loose = [{"role": "tool", "content": "r"}]
    assert asked(template, USER, message, *loose) == "so f0{} =r f1{} f2{} "


def test_b47_late_instructions_that_a_template_drops_go_to_the_front() -> None:
    """llama.cpp#20215: a template that reads the first message alone for them."""
    template = (
        "{% set rest = messages[1:] if messages[0].role in ('system', 'developer') else messages %}"
        "{% if messages[0].role in ('system', 'developer') %}<{{ messages[0].content }}>{% endif %}"
        "{% for m in rest %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    )
    system, developer = {"role": "system", "content": "a"}, {"role": "developer", "content": "b"}
    assert asked(template, system, developer, {"role": "user", "content": "u"}) == "<a\n\nb>u"
    assert asked(template, developer, {"role": "user", "content": "u"}) == "<b>u"
    late = {"role": "system", "content": "c"}
    assert asked(template, {"role": "user", "content": "u"}, late) == "<c>u"


def test_a_thought_and_a_text_beside_a_call_are_one_for_a_template_that_takes_one() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}"
        "{% endif %}{{ m.thinking }}|{{ m.content }};{% endfor %}"
    )
    message = {"role": "assistant", "content": "said", "reasoning_content": "thought", "tool_calls": [CALL]}
    assert asked(template, USER, message).endswith(";thought\n\nsaid|;")


ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
BARE = "{% for m in messages if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def test_tools_calls_and_results_are_text_where_the_template_does_not_write_them() -> None:
    """So that no tool, call or result is dropped; a template that writes them is left to it."""
    conversation = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "abcdefghi"},
    ]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich <x>", "days": [1, null]}}\n</tool_call>'
    for template, result in (
        (ROLES, "<tool>r"),
        (BARE, "<user><tool_response>\nr\n</tool_response>"),
    ):
        text = asked(template, *conversation, tools=TOOLS, tool_notation="hermes")
        system, rest = text.split("<user>u")
        assert rest == f"<assistant>a\n{call}\n{call}{result}<assistant>"
        assert system.startswith("<system># Tools\n") and json.dumps(PARAMETERS, ensure_ascii=False) in system
    told = asked(ROLES, {"role": "developer", "content": "s"}, USER, tools=TOOLS, tool_notation="hermes")
    assert told.startswith("<system>s\n\n# Tools\n")
    assert asked(ROLES, USER, tools=TOOLS) == asked(ROLES, USER, tool_notation="hermes")
    broken = {**CALL, "function": {"name": "f", "arguments": "{"}}
    assert '"arguments": {}' in asked(
        ROLES, USER, {"role": "assistant", "tool_calls": [broken]}, tool_notation="hermes"
    )
    for name in TEMPLATES.keys() - {"smollm2", "deepseek-v3.1", "deepseek-r1-distill"} - SMALL.keys():
        assert asked(TEMPLATES[name], *conversation, tools=TOOLS, tool_notation="hermes") == asked(
            TEMPLATES[name], *conversation, tools=TOOLS
        )


def test_what_a_template_takes_is_found_by_what_it_draws() -> None:
    found = {name: ChatTemplate(source, SPECIALS).abilities for name, source in TEMPLATES.items()}
    assert {name for name, can in found.items() if can.short_ids} <= {"mistral-nemo"}
    assert not [name for name, can in found.items() if can.text_arguments]
    untold = {"smollm2", "deepseek-v3.1", "deepseek-r1-distill"}
    assert {name for name, can in found.items() if not can.tools and name not in SMALL} <= untold
    assert {name for name, can in found.items() if not can.calls} <= {"smollm2"}
    assert {name for name, can in found.items() if not can.results and name not in SMALL} == set()
    assert {name for name, can in found.items() if can.one_call} <= {"gpt-oss"} and not found["hermes"].one_call
    assert ChatTemplate(PLAIN).abilities == Abilities(tools=False, calls=False)
