"""The request bodies, and the policy of fields: one works, is refused by name, or is in ACCEPTED_WITHOUT_EFFECT.

A field of a wrong type is always refused; a field that nobody knows is tolerated. docs/http-api.md is generated from
these tables.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.sampling_params import MAX_LOGPROBS, SamplingParams

ACCEPTED_WITHOUT_EFFECT = (
    "client_metadata",
    "include",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

# Fields that would change the answer but do not work: refused, unless they hold a value that asks for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


class StreamOptions(BaseModel):
    """How a stream reports its counts."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and text completions share. null stands for the default everywhere."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    REFUSED_HERE: ClassVar[tuple[str, ...]] = ()

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_fields(self) -> None:
        """Raise RequestError for the first field that would change the answer but does not work."""
        extra = self.model_extra or {}
        for name in (*REFUSED, *self.REFUSED_HERE):
            value = extra.get(name)
            if value is not None and value not in REFUSED.get(name, (False,)):
                raise RequestError(f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")

    def _params(self, **more: Any) -> SamplingParams:
        """The sampling parameters; `more` wins. Raises RequestError."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**{**given, **more})


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    REFUSED_HERE: ClassVar[tuple[str, ...]] = ("echo",)

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def sampling(self) -> SamplingParams:
        """max_tokens null: the rest of the context."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs must lie in 0..{MAX_LOGPROBS}, not {top}", param="top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._params(max_tokens=limit, logprobs=top if self.logprobs else None)

    def template_variables(self) -> dict[str, Any]:
        """What goes to the chat template beside the messages."""
        variables = dict(self.chat_template_kwargs or {})
        for name in ("messages", "add_generation_prompt", "continue_final_message"):
            if name in variables:
                raise RequestError(f"{name} is a field of the request, not one of chat_template_kwargs", param=name)
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        goes_on = bool(self.continue_final_message)
        begins = not goes_on if self.add_generation_prompt is None else self.add_generation_prompt
        return {**variables, "add_generation_prompt": begins, "continue_final_message": goes_on}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. The prompt is a text, token ids, or a list of either."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    def sampling(self) -> SamplingParams:
        """max_tokens null: 16, as OpenAI has it."""
        return self._params(max_tokens=16 if self.max_tokens is None else self.max_tokens, logprobs=self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt. Raises RequestError for an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is an empty list: send at least one token or text", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]


FIELDS = frozenset(
    name for body in (ChatRequest, CompletionRequest, StreamOptions) for name in body.model_fields
)  # what an error may name


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise RequestError("the keys of logit_bias must be token ids", param="logit_bias")
    return int(key)
