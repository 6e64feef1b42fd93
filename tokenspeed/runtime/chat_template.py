"""A conversation to the prompt text, by the model's own Jinja template, exactly as Hugging Face renders it.

The template is untrusted: it runs in Jinja's immutable sandbox. What clients send is brought to the form that the
template was written for (chat_messages.py), and a template that still refuses is a RequestError with its own words.
Of what is in that form already, the text is the one that transformers renders.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro

from tokenspeed.runtime.chat_messages import (
    Abilities,
    Message,
    find_abilities,
    forms,
    normalise,
    one_call_each,
    repaired,
    thoughts_whole,
    written,
)
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import RequestError, StartupError
from tokenspeed.runtime.tokenizer import Tokenizer


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; for serving it is its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, no sorting, letters stay letters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Dict:
    """`dict` of templates, without the attributes of the type."""

    def __call__(self, *args: Any, **names: Any) -> dict[Any, Any]:
        return dict(*args, **names)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["dict"] = _Dict()
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


_TAG = (
    "CONTINUE_FINAL_MESSAGE_TAG "  # behind the message to go on with; what a template makes of it shows where that ends
)


class ChatTemplate:
    """A compiled template with the special tokens it may name. Raises StartupError when it does not compile."""

    def __init__(
        self, source: str, special_tokens: dict[str, str] | None = None, *, with_tools: ChatTemplate | None = None
    ) -> None:
        """`with_tools`: the model's other template, for requests with tools."""
        self._specials = special_tokens or {}
        self._with_tools = with_tools
        self._source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as fault:
            raise StartupError(f"the chat template does not compile: {fault}") from None
        self.abilities: Abilities = find_abilities(self._probe, names_developer="developer" in source)

    @property
    def source(self) -> str:
        """The texts of all templates of the model."""
        return self._source + (self._with_tools.source if self._with_tools else "")

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        tool_notation: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text.

        `continue_final_message` leaves the last message open, to be gone on with. `tools` are shown in the shape of
        chat completions, `documents` to templates that read them. What a template does not write of tools, calls and
        results is text in the notation of `tool_notation`, a tool parser, and left out without one. `variables` are
        the template's own (chat_template_kwargs). Raises RequestError.
        """
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                tool_notation=tool_notation,
                **variables,
            )
        if not isinstance(messages, list | tuple) or not all(isinstance(message, dict) for message in messages):
            raise RequestError("messages must be a list of objects with role and content", param="messages")
        if not messages:
            raise RequestError("messages is empty: send at least one", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message leaves the last message open, add_generation_prompt begins a new one: "
                "set one of them",
                param="continue_final_message",
            )
        shaped = [normalise(message, at, self.abilities) for at, message in enumerate(messages)]
        if tool_notation:
            shaped = written(shaped, self.abilities, tool_notation, tools or ())
        if self.abilities.one_call:
            shaped = one_call_each(shaped)
        given = {"add_generation_prompt": add_generation_prompt, "tools": tools or None, "documents": documents or None}
        if not continue_final_message:
            return self._first_accepted(shaped, {**given, **variables})
        final = _final_text(shaped[-1])
        return _cut(self._first_accepted([*shaped[:-1], _tagged(shaped[-1])], {**given, **variables}), final)

    def _first_accepted(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """Of the forms of a conversation that say the same the first that the template accepts."""
        fault: Exception | None = None
        for conversation in (messages, thoughts_whole(messages), repaired(messages)):
            if conversation is None:
                continue
            for form in forms(conversation, self.abilities):
                if (shaped := form(conversation)) is None:
                    continue
                try:
                    return self._render(shaped, variables)
                except Exception as error:  # a template may fail in any way: it is a program that comes with the model
                    fault = fault or error
        # A template's own words are the model author's; those of another exception may hold what was sent.
        words = str(fault) if isinstance(fault, jinja2.TemplateError) else type(fault).__name__
        raise RequestError(f"the chat template refuses this conversation: {words}", param="messages") from None

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        return self._template.render({**self._specials, **variables, "messages": messages})

    def _probe(self, messages: list[Message], tools: list[Any] | None = None) -> str | None:
        try:
            return self._render(messages, {"add_generation_prompt": True, "tools": tools, "documents": None})
        except Exception:  # as above
            return None


def load_template(config: EngineConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that `config.chat_template` names, else the tokenizer's own, else None. Raises StartupError."""
    sources = tokenizer.chat_templates
    if config.chat_template:
        path = Path(config.chat_template).expanduser()
        try:
            sources = {"default": path.read_text("utf-8")}
        except (OSError, UnicodeDecodeError) as fault:
            raise StartupError(f"cannot read the chat template {path}: {fault}") from None
    specials = tokenizer.special_tokens
    with_tools = ChatTemplate(sources["tool_use"], specials) if "tool_use" in sources else None
    default = sources.get("default")
    return ChatTemplate(default, specials, with_tools=with_tools) if default else with_tools


def _final_text(message: Message) -> str:
    """The text of a message that is to be gone on with: of its last part."""
    content = message["content"]
    text = content[-1]["text"] if isinstance(content, list) else content
    if not text.strip():
        raise _nothing_to_continue()
    return text


def _tagged(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _TAG}
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _TAG}]}


def _cut(text: str, final: str) -> str:
    """The prompt up to the tag. Where the template trims the message, so is what is gone on with."""
    at = text.rfind(_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise _nothing_to_continue()
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


def _nothing_to_continue() -> RequestError:
    return RequestError(
        "continue_final_message needs a last message with a text that the chat template keeps",
        param="continue_final_message",
    )
