"""Arguments of `Engine.generate` beside prompt and sampling parameters. Invariant: one that other engines know either works or is
refused by name with the reason; one that holds nothing asks for nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from tokenspeed.runtime.errors import RequestError
from tokenspeed.runtime.grammar.fields import from_structured_outputs
from tokenspeed.runtime.sampling_params import SamplingParams

_TEXT_ONLY = "models here take text alone"
_NO_ROLES = "prefill and decode run in one engine here"
_LOGPROBS = "ask for the best alternatives with sampling_params logprobs"
#: what is refused, and why
REFUSED = {
    "image_data": _TEXT_ONLY, "audio_data": _TEXT_ONLY, "video_data": _TEXT_ONLY, "multi_modal_data": _TEXT_ONLY,
    "input_embeds": "a prompt is a text or token ids",
    "return_hidden_states": "hidden states stay on the device: a step gives tokens and log-probabilities",
    "custom_logit_processor": "logits stay on the device; use logit_bias, allowed_token_ids or structured_outputs",
    "logits_processors": "logits stay on the device; use logit_bias, allowed_token_ids or structured_outputs",
    "token_ids_logprob": f"log-probabilities of chosen ids are not kept; {_LOGPROBS}",
    "return_logprob": _LOGPROBS, "top_logprobs_num": _LOGPROBS, "logprob_start_len": f"of prompts there are none; {_LOGPROBS}",
    "lora_path": "a model is served with the weights that it was loaded with",
    "lora_request": "a model is served with the weights that it was loaded with",
    "bootstrap_host": _NO_ROLES, "bootstrap_port": _NO_ROLES, "bootstrap_room": _NO_ROLES,
    "data_parallel_rank": "the scheduler picks the group of each request",
}  # fmt: skip
WORKING = ("structured_outputs",)


def with_arguments(params: list[SamplingParams], arguments: Mapping[str, Any]) -> list[SamplingParams]:
    """The parameters of each prompt with what the arguments say. Raises RequestError that names a wrong one."""
    for name, value in arguments.items():
        if name not in (*REFUSED, *WORKING):
            near = difflib.get_close_matches(name, (*WORKING, *REFUSED, "prompt", "sampling_params", "input_ids"), n=1)
            raise RequestError(
                f"generate has no argument {name!r}{f': did you mean {near[0]}?' if near else ''}", param=name
            )
        if (
            name in REFUSED
            and value is not None
            and value is not False
            and (not hasattr(value, "__len__") or len(value))
        ):
            raise RequestError(f"{name} is not taken: {REFUSED[name]}", param=name)
    structure = from_structured_outputs(arguments.get("structured_outputs"))
    return params if structure is None else [dataclasses.replace(p, structure=structure) for p in params]
