"""Conversations in every form that clients send, by templates that differ in what they take."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.runtime.chat_template import ChatTemplate
from tokenspeed.runtime.errors import RequestError, StartupError

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{{ p.text }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + CHATML
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% endfor %}" + CHATML
)


def text_of(*parts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} for part in parts]


def render(template: str, *messages: dict[str, Any], **more: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(list(messages), **more)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_equals_transformers_on_the_embedded_template() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    from tokenspeed.runtime.gguf_metadata import find_embedded_model, read_metadata

    source = read_metadata(find_embedded_model())["tokenizer.chat_template"]
    for conversation in (
        [message("user", "hi")],
        [message("system", "be brief"), message("user", "a\nb"), message("assistant", "c"), message("user", "d é")],
    ):
        rendered, _ = render_jinja_template([conversation], chat_template=source, add_generation_prompt=True)
        assert ChatTemplate(source).render(conversation) == rendered[0]


HELPERS = """{%- for m in messages -%}
    {%- if loop.index0 == 1 %}{% continue %}{% endif -%}
    {%- if m.role == 'stop' %}{% break %}{% endif -%}
    {%- generation %}[{{ m.content }}]{% endgeneration -%}
{%- endfor %}
{{ bos_token }}{{ {'b': 'é<', 'a': [1]} | tojson }}{{ strftime_now('%Y') | length }}{{ extra }}"""


def test_helpers_equal_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [message("user", "x"), message("user", "y"), message("user", "z")]
    rendered, _ = render_jinja_template([conversation], chat_template=HELPERS, bos_token="<s>", extra=7)
    assert render(HELPERS, *conversation, extra=7) == rendered[0]
    assert rendered[0].endswith('<s>{"b": "é<", "a": [1]}47')


@pytest.mark.parametrize("template", [CHATML, PARTS])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], ""),
        (text_of("a"), "a"),
        (text_of("a", "b"), "a\nb"),
        ("a", "a"),
        (None, ""),
        ("", ""),
        ([{"type": "input_text", "text": "a"}], "a"),
    ],
)
def test_b46_content_of_every_form_for_every_role(template: str, role: str, content: Any, text: str) -> None:
    """rig#1362. A template that reads parts joins them as it will."""
    text = text.replace("\n", "") if template is PARTS else text
    assert render(template, message(role, content)) == f"<|{role}|>{text}\n<|assistant|>"


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_b45_no_content_beside_a_tool_call_is_the_same_in_all_forms(template: str) -> None:
    """lmstudio#261."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    forms = [{"content": None}, {}, {"content": ""}]
    texts = {render(template, {"role": "assistant", "tool_calls": [call], **form}) for form in forms}
    assert texts == {"<|assistant|>\n<|assistant|>"}


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"a": 1}', "a=1;"), ("", ""), ('{"a": ', '"{\\"a\\": "'), ("[1]", '"[1]"')]
)
def test_b43_b44_past_arguments_are_an_object_where_they_can_be(arguments: str, shown: str) -> None:
    """vllm#43995, vllm#48922 (broken ones are no error), vllm.cpp#526."""
    template = (
        "{% for c in messages[0].tool_calls %}{% set a = c.function.arguments %}"
        "{% if a is mapping %}{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}"
        "{% else %}{{ a | tojson }}{% endif %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": arguments}}
    assert render(template, {"role": "assistant", "tool_calls": [call]}) == shown


def test_b47_developer_is_system_where_the_template_does_not_know_it() -> None:
    """llama.cpp#20215."""
    assert render(CHATML, message("developer", "d")) == "<|system|>d\n<|assistant|>"
    knows = CHATML + "{# developer #}"
    assert render(knows, message("developer", "d")) == "<|developer|>d\n<|assistant|>"


def test_b47_late_instructions_go_to_the_front_where_the_template_demands_it() -> None:
    """vllm#43590, vllm#42407."""
    conversation = [message("developer", "d"), message("system", "s"), message("user", "u"), message("system", "t")]
    assert render(SYSTEM_FIRST, *conversation) == "<|system|>d\n\ns\n\nt\n<|user|>u\n<|assistant|>"
    assert render(CHATML, *conversation) == "<|system|>d\n<|system|>s\n<|user|>u\n<|system|>t\n<|assistant|>"


def test_b48_merged_instructions_keep_every_part() -> None:
    """vllm#56391."""
    template = SYSTEM_FIRST.replace(CHATML, PARTS)
    developer, system = message("developer", text_of("d1", "d2")), message("system", text_of("late"))
    assert (
        render(template, developer, system, message("user", "u"))
        == "<|system|>d1\nd2\n\nlate\n<|user|>u\n<|assistant|>"
    )


def test_b49_a_template_without_system_gets_it_in_the_first_user_message() -> None:
    """sglang#892."""
    text = render(NO_SYSTEM, message("system", "s"), message("user", "u"), message("user", "v"))
    assert text == "<|user|>s\n\nu\n<|user|>v\n<|assistant|>"
    with pytest.raises(RequestError, match="System role not supported"):
        render(NO_SYSTEM, message("system", "s"))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of"),
        ([message("wizard", "x")], r"messages\[0\]\.role must be one of"),
        ([message("user", "x"), message("user", 7)], r"messages\[1\]\.content must be a string"),
        ([message("user", [{"type": "image_url", "image_url": {}}])], r"content\[0\]\.type must be text"),
        ([message("user", "x") | {"tool_calls": 5}], r"messages\[0\]\.tool_calls must be a list"),
        ([message("user", [{"type": "text"}])], r"content\[0\]\.text must be a string"),
        ([message("user", [7])], r"content\[0\]\.text must be a string"),
    ],
)
def test_a_wrong_message_is_named(messages: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        render(CHATML, *messages)


def test_a_template_that_fails_is_a_request_error_with_its_words() -> None:
    with pytest.raises(RequestError, match="refuses this conversation: needs a user"):
        render("{{ raise_exception('needs a user') }}", message("user", "x"))


def test_what_fails_within_a_template_is_told_without_what_was_sent() -> None:
    with pytest.raises(RequestError, match=r"refuses this conversation: KeyError$"):
        render("{{ messages[0].content.format() }}", message("user", "{SECRET}"))


def test_variables_may_have_any_name() -> None:
    text = ChatTemplate("{{ self_ }}{{ messages[0].content }}").render(
        [message("user", "x")], **{"self": 1, "self_": 2}
    )
    assert text == "2x"
    with pytest.raises(RequestError, match="refuses this conversation"):
        render("{{ messages[5].content }}", message("user", "x"))


def test_a_template_is_sandboxed() -> None:
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(RequestError):
            render(attack, message("user", "x"))


def test_a_template_that_does_not_compile_is_a_start_up_error() -> None:
    with pytest.raises(StartupError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_the_last_message_can_be_left_open() -> None:
    conversation = [message("user", "u"), message("assistant", "I think ")]
    text = render(CHATML, *conversation, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|user|>u\n<|assistant|>I think "
    with pytest.raises(RequestError, match="set one of them"):
        render(CHATML, *conversation, continue_final_message=True)
    with pytest.raises(RequestError, match="needs a last message with a text"):
        render(CHATML, message("assistant", ""), add_generation_prompt=False, continue_final_message=True)
