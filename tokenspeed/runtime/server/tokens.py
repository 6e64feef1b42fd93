"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.server.chat.request import ChatRequest
from tokenspeed.runtime.server.protocol import Body
from tokenspeed.runtime.server.render import token_name
from tokenspeed.runtime.server.run import prompt
from tokenspeed.runtime.server.served import Served
from tokenspeed.runtime.server.whole import json_response


class TokenizeRequest(Body):
    """POST /tokenize: of a text, or of a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


async def tokenize(served: Served, body: TokenizeRequest) -> Response:
    """The prompt's token ids. Raises RequestError."""
    served.check_model(body.model)
    llm = served.llm
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either a prompt or messages", param="prompt")
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        _, ids = await prompt(llm, served.notation, chat.turn())
    else:
        ids = await llm.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    out: dict[str, Any] = {"count": len(ids), "max_model_len": llm.max_len, "tokens": ids}
    if body.return_token_strs:
        out["token_strs"] = [token_name(llm.tokenizer, token) for token in ids]
    return json_response(out)


def detokenize(served: Served, body: DetokenizeRequest) -> Response:
    """The text of token ids, special ones too. Raises RequestError."""
    served.check_model(body.model)
    tokenizer, limit = served.llm.tokenizer, served.llm.ready.vocab_size
    if tokenizer is None:
        raise RequestError("this model has no tokenizer: start with --tokenizer", param="tokens")
    if any(not 0 <= token < limit for token in body.tokens):
        raise RequestError(f"tokens holds a token id outside 0..{limit - 1}", param="tokens")
    return json_response({"prompt": "".join(tokenizer.pieces(body.tokens))})
