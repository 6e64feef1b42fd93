"""How a request is sampled: the public parameters, checked when made, resolved once against a model.

A `SamplingParams` that exists is valid by itself; `resolve` checks what depends on the model and the prompt (token
ids in the vocabulary, room in the context) and gives the engine core's parameters. Every refusal is a `RequestError`
that names the field.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.messages import CoreParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_BIAS = 100.0
MAX_REPETITION = 100.0  # and its inverse the least: logits over a float32 that underflows are no numbers
MAX_TIMEOUT = 1e7  # seconds
MAX_STOPS = 64  # stop strings, and characters of one: each is looked for at every character of an output
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_INTEGER = (1 << 63) - 1  # of every integer field: what the wire and the core can hold
SEED_MASK = (1 << 64) - 1  # a seed is an int64; it travels as the same 64 bits, unsigned


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; the defaults sample from the model's own distribution until it ends.

    temperature 0 is greedy. max_tokens None means the rest of the context. top_k 0 or -1, top_p 1, min_p 0 switch a
    filter off. The repetition penalty looks at prompt and output, presence and frequency penalties at the output
    alone. `logprobs` k asks for the sampled token's log-probability and those of the k best. A `seed` makes the
    request reproducible; it lies in -2^63..2^63-1, and choice i of `n` uses seed + i (modulo 2^64). A `structure` is what
    the output must look like; where it is complete the output ends, whatever min_tokens and ignore_eos say. After `timeout` seconds
    the request ends as aborted, with what there is.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structure: Structure | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        self.validate()

    @classmethod
    def of(cls, given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """The parameters that a caller's argument stands for: None the defaults, a mapping the fields it names.

        Raises RequestError, with the nearest name for a field that does not exist.
        """
        if given is None:
            return cls()
        if isinstance(given, SamplingParams):
            return given
        if not isinstance(given, Mapping):
            raise RequestError(
                f"sampling_params must be a SamplingParams or a dict of its fields, not a {type(given).__name__}",
                param="sampling_params",
            )
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(known)}"
                raise RequestError(f"{name!r} is no sampling parameter: {hint}", param="sampling_params")
        return cls(**given)

    @property
    def stops(self) -> list[str]:
        """The stop strings, always as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def validate(self) -> None:
        """Raise RequestError (a ValueError) for the first field that is wrong by itself."""
        check_integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_integer("top_k", self.top_k, -1)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError("logit_bias must map token ids to numbers", param="logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            check_integer("logit_bias", token, 0, what="a token id")
            _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids)):
            if ids is not None and not isinstance(ids, list):
                raise RequestError(f"{name} must be a list of token ids", param=name)
            for token in ids or ():
                check_integer(name, token, 0, what="a token id")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty, so nothing could be sampled: leave it out", param="allowed_token_ids"
            )
        if self.seed is not None:
            check_integer("seed", self.seed, -MAX_INTEGER - 1)
        if not isinstance(self.stop, str) and not (
            isinstance(self.stop, list) and all(isinstance(item, str) for item in self.stop)
        ):
            raise RequestError("stop must be a string or a list of strings", param="stop")
        if any(not item for item in self.stops):
            raise RequestError("stop holds an empty string, which would end every output: leave it out", param="stop")
        if len(self.stops) > MAX_STOPS or any(len(item) > MAX_STOP_CHARS for item in self.stops):
            raise RequestError(
                f"stop may hold {MAX_STOPS} strings of {MAX_STOP_CHARS} characters: send fewer, or shorter ones",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids may hold {MAX_STOP_IDS} ids: send fewer", param="stop_token_ids")
        for item in self.stops:
            check_text("stop", item)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", param=name)
        if self.stops and not self.detokenize:
            raise RequestError("stop needs the text, but detokenize is false: use stop_token_ids", param="stop")
        check_integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", param="min_tokens"
                )
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.timeout is not None:
            _number("timeout", self.timeout, 0.0, MAX_TIMEOUT, open_low=True)
        if not isinstance(self.structure, Structure | None):
            raise RequestError("structure must be a Structure", param="structure")

    def resolve(self, prompt_len: int, max_model_len: int, eos_ids: Iterable[int], vocab_size: int) -> CoreParams:
        """The engine core's parameters for a prompt of `prompt_len` tokens, seed as given (0 where none is).

        Raises RequestError; with code context_length_exceeded where prompt and output do not fit `max_model_len`.
        Fields may have been assigned since the object was made, so they are checked once more.
        """
        self.validate()
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            if any(token >= vocab_size for token in ids or ()):
                raise RequestError(
                    f"{name} names a token id beyond the vocabulary: ids are 0..{vocab_size - 1}", param=name
                )
        stop_ids = set(self.stop_token_ids) | (set() if self.ignore_eos else set(eos_ids))
        return CoreParams(
            max_tokens=self._budget(prompt_len, max_model_len),
            min_tokens=self.min_tokens,
            stop_token_ids=sorted(stop_ids),
            temperature=float(self.temperature),
            top_k=max(self.top_k, 0),
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias={token: float(bias) for token, bias in (self.logit_bias or {}).items()},
            allowed_token_ids=None if self.allowed_token_ids is None else list(self.allowed_token_ids),
            seed=(self.seed or 0) & SEED_MASK,
            logprobs=-1 if self.logprobs is None else self.logprobs,
            structure=self.structure,
        )

    def _budget(self, prompt_len: int, limit: int) -> int:
        """Tokens that may be generated: max_tokens if it fits, else the rest of the context of `limit` tokens."""
        wanted = self.max_tokens
        if wanted is None:
            wanted = max(limit - prompt_len, self.min_tokens, 1)
        if prompt_len + wanted <= limit:
            return wanted
        asked = f"max_tokens {wanted}" if self.max_tokens is not None else f"at least {wanted} token(s) of output"
        raise RequestError(
            f"the context holds {limit} tokens, but the prompt has {prompt_len} and the request asks for {asked}: "
            "shorten the prompt or ask for fewer tokens",
            param="max_tokens" if prompt_len < limit else "prompt",
            code="context_length_exceeded",
        )


def check_integer(name: str, value: Any, low: int, high: int = MAX_INTEGER, *, what: str = "an integer") -> None:
    """Raise RequestError, naming the field, for what is no integer in low..high. A bool is none."""
    if type(value) is not int or not low <= value <= high:
        bound = f"at least {low}" if high == MAX_INTEGER else f"in {low}..{high}"
        raise RequestError(f"{name} must be {what} {bound}, not {_shown(value)}", param=name)


def check_text(name: str, value: Any) -> None:
    """Raise RequestError, naming the field, for what is no string of Unicode characters."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, not {_shown(value)}", param=name)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{name} is not valid Unicode (it holds a lone surrogate)", param=name) from None


def _shown(value: Any) -> str:
    """A wrong value in a message: a number that a line can hold; of all else the type alone."""
    if type(value) is float or (type(value) is int and abs(value) <= MAX_INTEGER):
        return str(value)
    return "one beyond 64 bits" if type(value) is int else f"a {type(value).__name__}"


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuses NaN too: every comparison with it is false."""
    fits = type(value) in (int, float) and (low < value if open_low else low <= value) and value <= high
    if not fits or not math.isfinite(value):
        raise RequestError(
            f"{name} must be a number in {'(' if open_low else '['}{low:g}, {high:g}], not {_shown(value)}", param=name
        )
