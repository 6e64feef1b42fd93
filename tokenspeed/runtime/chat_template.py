"""A conversation to the prompt text, by the model's own Jinja template, exactly as Hugging Face renders it.

The template is untrusted: it runs in Jinja's immutable sandbox. What clients send is brought to the one form that
the template was written for (roles it knows, content as text or as parts), nothing of it is dropped, and a template
that still refuses is a RequestError with the template's own words.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Macro

from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import RequestError, StartupError
from tokenspeed.runtime.tokenizer import Tokenizer

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
_PROBE = "\u2055probe\u2055"


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


def _tojson(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Unlike Jinja's own filter: no HTML escapes, no sorting, letters stay letters."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled template with the special tokens it may name. Raises StartupError when it does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        self.source = source
        self._specials = special_tokens or {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as fault:
            raise StartupError(f"the chat template does not compile: {fault}") from None
        self._knows_developer = "developer" in source
        self._wants_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text.

        `continue_final_message` leaves the last message open, to be gone on with. `variables` are the template's
        (chat_template_kwargs). Raises RequestError.
        """
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
        messages = [self._normalise(message, at) for at, message in enumerate(messages)]
        text = self._first_accepted(messages, {"add_generation_prompt": add_generation_prompt, **variables})
        return _cut_after_final(text, messages) if continue_final_message else text

    def _first_accepted(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """Of the forms of a conversation that say the same the first that the template accepts."""
        fault: Exception | None = None
        for form in (_as_sent, _systems_first, _system_in_user):
            shaped = form(messages)
            if shaped is None:
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

    def _shows(self, content: Any) -> bool:
        """Whether a user message with this content appears in the prompt as the text that it is."""
        try:
            text = self._render([{"role": "user", "content": content}], {"add_generation_prompt": True})
        except Exception:  # as above
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _normalise(self, message: Message, at: int) -> Message:
        """One message with a role and a content of the form that the template takes."""
        where = f"messages[{at}]"
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
        if role == "developer" and not self._knows_developer:
            role = "system"
        text = _text(message.get("content"), where)
        out = {key: value for key, value in message.items() if value is not None}
        out |= {"role": role, "content": [{"type": "text", "text": text}] if self._wants_parts else text}
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
            out["tool_calls"] = [_parsed_call(call) for call in calls]
        return out


def load_template(config: EngineConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template that `config.chat_template` names, else the tokenizer's own, else None. Raises StartupError."""
    source = tokenizer.chat_templates.get("default")
    if config.chat_template:
        path = Path(config.chat_template).expanduser()
        try:
            source = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise StartupError(f"cannot read the chat template {path}: {fault}") from None
    return ChatTemplate(source, tokenizer.special_tokens) if source else None


def _text(content: Any, where: str) -> str:
    """The text of a message's content: a string, null, or a list of text parts, joined by line feeds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind not in ("text", "input_text", "output_text"):
            raise RequestError(
                f"{where}.content[{i}].type must be text: this model takes nothing else",
                param=f"{where}.content[{i}].type",
            )
        if not isinstance(text, str):
            raise RequestError(f"{where}.content[{i}].text must be a string", param=f"{where}.content[{i}]")
        texts.append(text)
    return "\n".join(texts)


def _parsed_call(call: Any) -> Any:
    """A past tool call with its arguments as the object that templates iterate; a broken one stays the text it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _as_sent(messages: list[Message]) -> list[Message]:
    return messages


def _systems_first(messages: list[Message]) -> list[Message] | None:
    """All instructions in one message at the front; None when that changes nothing."""
    systems = [message for message in messages if message["role"] in ("system", "developer")]
    if not systems or (len(systems) == 1 and messages[0] is systems[0] and systems[0]["role"] == "system"):
        return None
    merged = {"role": "system", "content": _joined([message["content"] for message in systems])}
    return [merged, *(message for message in messages if message["role"] not in ("system", "developer"))]


def _system_in_user(messages: list[Message]) -> list[Message] | None:
    """The instructions at the front of the first user message; None without instructions or without a user."""
    systems = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    at = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if not systems or at is None:
        return None
    folded = {**rest[at], "content": _joined([*systems, rest[at]["content"]])}
    return [*rest[:at], folded, *rest[at + 1 :]]


def _joined(contents: list[Any]) -> Any:
    """Contents of the form `_normalise` gives (a text, or one text part) as one, with an empty line between them."""
    if isinstance(contents[0], str):
        return "\n\n".join(contents)
    return [{"type": "text", "text": "\n\n".join(content[0]["text"] for content in contents)}]


def _cut_after_final(text: str, messages: list[Message]) -> str:
    content = messages[-1]["content"]
    final = content[-1]["text"] if isinstance(content, list) else content
    at = text.rfind(final.strip())
    if not final.strip() or at < 0:
        raise RequestError(
            "continue_final_message needs a last message with a text that the chat template keeps",
            param="continue_final_message",
        )
    whole = text.rfind(final)
    return text[: whole + len(final)] if whole >= 0 else text[: at + len(final.strip())]
