"""The request bodies, and the policy of fields: one works, is refused by name, or is in ACCEPTED_WITHOUT_EFFECT.

A field of a wrong type is always refused; a field that nobody knows is tolerated. docs/http-api.md is generated from
these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.fields import from_response_format, from_structured_outputs
from tokenspeed.runtime.grammar.structure import Structure
from tokenspeed.runtime.sampling_params import SamplingParams

ACCEPTED_WITHOUT_EFFECT = (
    "client_metadata",
    "include",
    "metadata",
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
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
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
    "timeout",
)
_GUIDED = ("json", "regex", "choice", "grammar")


FIELDS: set[str] = set()  # the names of all fields of all bodies: what an error may name


class Body(BaseModel):
    """Any body. null stands for the default everywhere."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # unless they hold a value that asks for nothing
    IGNORED: ClassVar[tuple[str, ...]] = ()  # accepted without effect

    def check_fields(self) -> None:
        """Raise RequestError for the first field that would change the answer but does not work."""
        extra = self.model_extra or {}
        for name, nothing in self.REFUSED.items():
            value = extra.get(name)
            if value is not None and value not in nothing:
                raise RequestError(f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        FIELDS.update(cls.model_fields)


class StreamOptions(Body):
    """How a stream reports its counts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Body):
    """What chat and text completions share."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED
    IGNORED: ClassVar[tuple[str, ...]] = ACCEPTED_WITHOUT_EFFECT

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
    timeout: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check_fields(self) -> None:
        """Of those that do not work, and of those that contradict each other."""
        super().check_fields()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")

    def structure(self) -> Structure | None:
        """What the output must look like, by whichever of the fields says it. Raises RequestError."""
        found = {
            "response_format": from_response_format(self.response_format),
            "structured_outputs": from_structured_outputs(self.structured_outputs),
        }
        for name in _GUIDED:
            if (value := getattr(self, f"guided_{name}")) is not None:
                found[f"guided_{name}"] = from_structured_outputs({name: value}, f"guided_{name}")
        given = [name for name, structure in found.items() if structure is not None]
        if len(given) > 1:
            raise RequestError(f"{given[0]} and {given[1]} both give a structure: send one of them", param=given[0])
        return found[given[0]] if given else None

    def _params(self, **more: Any) -> SamplingParams:
        """The sampling parameters; `more` wins. Raises RequestError."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return SamplingParams(**{**given, "structure": self.structure(), **more})


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. The prompt is a text, token ids, or a list of either."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**REFUSED, "tools": ([],)}

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


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise RequestError("the keys of logit_bias must be token ids", param="logit_bias")
    return int(key)
