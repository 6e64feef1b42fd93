"""A conversation as clients send it to the form that a chat template was written for.

Invariant: nothing that says something is dropped, and a form says the same as what was sent. What a template takes is
found once, by rendering short probes (`Abilities`), so that a message is shaped by what the template does with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.parsers.writing import calls_text, tools_text

Message = dict[str, Any]
Probe = Callable[..., str | None]  # the text of a conversation (and tools), None where the template refuses it

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of an assistant's past thoughts; the first is usual
_MARK = "\u2055probe\u2055"
_VALUE = "\u2055value\u2055"
_NAME = "\u2055name\u2055"
_SHORT_ID = 9  # letters of an id, as Mistral's templates demand
_LONG_ID = "call_0123456789abcdef01234567"
_AS_PART = re.compile(r"""["']text["']\s*:""")


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a template does; the defaults stand where a probe cannot tell."""

    parts: frozenset[str] = frozenset()  # roles whose content may be a list of parts
    parts_only: frozenset[str] = frozenset()  # of those, the ones whose content must be
    developer: bool = False  # knows the role
    late_instructions: bool = True  # shows, or refuses, instructions behind other messages, and does not drop them
    text_arguments: bool = False  # wants the arguments of past calls as text
    short_ids: bool = False  # wants ids of calls of 9 letters
    one_call: bool = False  # shows only the first call of a message
    tools: bool = True  # writes the tools
    calls: bool = True  # writes past calls
    results: bool = True  # writes results of calls


def find_abilities(probe: Probe, *, names_developer: bool) -> Abilities:
    """Of the template behind `probe`; `names_developer`: its source has the word."""
    parts, only = set[str](), set[str]()
    for role in ("system", "user", "assistant", "tool"):
        takes_text = _shows(probe(_with_content(role, _MARK)))
        if _shows(probe(_with_content(role, [{"type": "text", "text": _MARK}]))):
            parts.add(role)
            if not takes_text:
                only.add(role)
    user: Message = {"role": "user", "content": "u"}
    system: Message = {"role": "system", "content": "s"}
    developer: Message = {"role": "developer", "content": _MARK}
    knows = names_developer and _shows(probe([developer, user]))
    late = [[system, user, {"role": "system", "content": _MARK}, user]]
    if knows:
        late.append([system, developer, user])
    arguments = {_VALUE: _VALUE}
    written = json.dumps(arguments, ensure_ascii=False)
    as_text, short = next(
        (
            (form is written, call_id is not _LONG_ID)
            for form in (arguments, written)
            for call_id in (_LONG_ID, "abcdefgh")
            if _drawn(probe(_calls(form, call_id=call_id)))
        ),
        (False, False),
    )
    result = probe(_with_content("tool", _MARK))
    tool = {"type": "function", "function": {"name": _MARK, "description": _MARK, "parameters": {"type": "object"}}}
    two = probe(_calls(written if as_text else arguments, count=2))
    return Abilities(
        parts=frozenset(parts),
        parts_only=frozenset(only),
        developer=knows,
        late_instructions=all((text := probe(messages)) is None or _MARK in text for messages in late),
        text_arguments=as_text,
        short_ids=short,
        one_call=two is not None and f"{_NAME}0" in two and f"{_NAME}1" not in two,
        tools=(text := probe([user], [tool])) is None or _MARK in text,
        calls=two is None or f"{_NAME}0" in two,
        results=result is None or _MARK in result,
    )


def _with_content(role: str, content: Any) -> list[Message]:
    message: Message = {"role": role, "content": content}
    user: Message = {"role": "user", "content": "u"}
    if role == "system":
        return [message, user]
    if role == "assistant":
        return [user, message, user]
    return [*_calls({})[:2], message | {"tool_call_id": "abcdefgh0", "name": "f"}] if role == "tool" else [message]


def _calls(arguments: Any, *, count: int = 1, call_id: str = "abcdefgh") -> list[Message]:
    """A conversation with `count` past calls, of tools whose names end in a number, and their results."""
    ids = [f"{call_id}{i}" for i in range(count)]
    calls = [
        {"id": id_, "type": "function", "function": {"name": f"{_NAME}{i}", "arguments": arguments}}
        for i, id_ in enumerate(ids)
    ]
    results = [{"role": "tool", "content": "r", "tool_call_id": id_, "name": f"f{i}"} for i, id_ in enumerate(ids)]
    return [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
    ]


def _shows(text: str | None) -> bool:
    """Whether a probed content is in the prompt as the text that it is."""
    return text is not None and _MARK in text and not _AS_PART.search(text)


def _drawn(text: str | None) -> bool:
    """Whether probed arguments are in the prompt, and not as Python or as a string within JSON would show them."""
    return text is not None and _VALUE in text and f"'{_VALUE}'" not in text and f'\\"{_VALUE}' not in text


# ---- one message ---------------------------------------------------------------------------------------------------


def normalise(message: Message, at: int, can: Abilities) -> Message:
    """The message `at` of a conversation, with a role, a content and calls of forms that the template takes."""
    where = f"messages[{at}]"
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if role == "developer" and not can.developer:
        role = "system"
    out = {key: value for key, value in message.items() if value is not None}
    out |= {"role": role, "content": _content(message.get("content"), where, role, can)}
    thought = next((out[name] for name in REASONING if isinstance(out.get(name), str)), None)
    if role == "assistant" and thought is not None:
        out = {"thinking": thought, **out, "reasoning_content": thought}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        for i, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                place = f"{where}.tool_calls[{i}]"
                raise RequestError(f"{place}.function must be an object with a name", param=place)
        out["tool_calls"] = [_call(call, can) for call in calls]
    else:
        out.pop("tool_calls", None)
    if can.short_ids and isinstance(call_id := out.get("tool_call_id"), str):
        out["tool_call_id"] = _short(call_id)
    return out


def _content(content: Any, where: str, role: str, can: Abilities) -> Any:
    """A text, or text parts where the template wants them, or takes them and several were sent."""
    texts = _texts(content, where)
    role = "system" if role == "developer" else role
    if role in can.parts_only or (role in can.parts and len(texts) > 1):
        return [{"type": "text", "text": text} for text in texts or [""]]
    return "\n".join(texts)


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a message's content: a string, null, or a list of text parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
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
    return texts


def _call(call: Any, can: Abilities) -> Any:
    """A past call with its arguments in the form that the template draws; broken ones stay the text they are."""
    if not isinstance(call, dict):
        return call
    call = {"type": "function", **call}
    if can.short_ids and isinstance(call.get("id"), str):
        call["id"] = _short(call["id"])
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str | None) and not can.text_arguments:
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, str) and can.text_arguments:
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _short(call_id: str) -> str:
    """Nine letters and digits that stand for an id; such an id stands for itself."""
    if len(call_id) == _SHORT_ID and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT_ID]


# ---- a conversation ------------------------------------------------------------------------------------------------

Form = Callable[[Sequence[Message]], list[Message] | None]  # None: it changes nothing


def forms(messages: list[Message], can: Abilities) -> list[Form]:
    """What to try of a conversation, the best first. Each form says all that was sent."""

    def whole(messages: Sequence[Message]) -> list[Message]:
        return list(messages)

    drops = not can.late_instructions and any(message["role"] in INSTRUCTIONS for message in messages[1:])
    return [*([] if drops else [whole]), systems_first, system_in_user, *([whole] if drops else [])]


def systems_first(messages: Sequence[Message]) -> list[Message] | None:
    """All instructions in one message at the front."""
    systems = [message for message in messages if message["role"] in INSTRUCTIONS]
    if not systems or (len(systems) == 1 and messages[0] is systems[0] and systems[0]["role"] == "system"):
        return None
    merged = {"role": "system", "content": _joined([message["content"] for message in systems])}
    return [merged, *(message for message in messages if message["role"] not in INSTRUCTIONS)]


def system_in_user(messages: Sequence[Message]) -> list[Message] | None:
    """The instructions at the front of the first user message; None without instructions or without a user."""
    systems = [message["content"] for message in messages if message["role"] in INSTRUCTIONS]
    rest = [message for message in messages if message["role"] not in INSTRUCTIONS]
    at = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if not systems or at is None:
        return None
    folded = {**rest[at], "content": _joined([*systems, rest[at]["content"]])}
    return [*rest[:at], folded, *rest[at + 1 :]]


def _joined(contents: list[Any], between: str = "\n\n") -> Any:
    """Contents (texts, or lists of text parts) as one of the first one's form."""
    text = between.join(map(_flat, contents))
    return text if isinstance(contents[0], str) else [{"type": "text", "text": text}]


def _flat(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def repaired(messages: Sequence[Message]) -> list[Message] | None:
    """Past arguments that are no object as the one value of an object, for templates that only take objects."""
    changed = False
    out: list[Message] = []
    for message in messages:
        calls = [_repaired_call(call) for call in message.get("tool_calls", ())]
        changed = changed or calls != message.get("tool_calls", [])
        out.append({**message, "tool_calls": calls} if calls else message)
    return out if changed else None


def _repaired_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": arguments}}}


def thoughts_whole(messages: Sequence[Message]) -> list[Message] | None:
    """What was said beside a call as a part of the thought before it, for templates that take one of the two."""
    changed = False
    out: list[Message] = []
    for message in messages:
        thought, said = message.get("thinking"), message.get("content")
        if message.get("tool_calls") and thought and isinstance(said, str) and said:
            changed = True
            both = f"{thought}\n\n{said}"
            message = {**message, "thinking": both, "reasoning_content": both, "content": ""}
        out.append(message)
    return out if changed else None


def written(
    messages: Sequence[Message], can: Abilities, notation: str, tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """What the template does not write of tools, past calls and results, as text in a tool parser's notation."""
    out: list[Message] = []
    for message in messages:
        if not can.calls and (calls := message.get("tool_calls")):
            functions = [call.get("function", {}) for call in calls if isinstance(call, dict)]
            text = calls_text(notation, [(str(f.get("name", "")), f.get("arguments") or {}) for f in functions])
            bare = {key: value for key, value in message.items() if key != "tool_calls"}
            said = [message["content"]] if _flat(message["content"]) else []
            message = bare | {"content": _joined([*said, text], "\n")}
        elif not can.results and message["role"] == "tool":
            text = f"<tool_response>\n{_flat(message['content'])}\n</tool_response>"
            message = {"role": "user", "content": _joined([text])}
        out.append(message)
    if tools and not can.tools:
        text = tools_text(notation, tools)
        if out[0]["role"] in INSTRUCTIONS:
            out[0] = out[0] | {"content": _joined([out[0]["content"], text])}
        else:
            out.insert(0, {"role": "system", "content": text})
    return out


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own with its result behind it, for templates that show one call a message."""
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            out.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for i, call in enumerate(calls):
            bare = {key: value for key, value in message.items() if key not in REASONING} | {"content": ""}
            out.append({**(bare if i else message), "tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            out += own or ([] if i else [result for result in results if result.get("tool_call_id") is None])
            results = [result for result in results if not any(result is item for item in out)]
        out += results
    return out
