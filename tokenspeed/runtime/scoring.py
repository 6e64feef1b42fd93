"""Log-probabilities of a prompt's own tokens, as `echo` with `logprobs` asks for them.

Token i is scored by a request whose prompt is the tokens before it and whose one output token may only be token i:
the core reports log-probabilities of the raw logits, which the restriction does not touch. The longest of these
requests runs first, so that the others find their prompts in the prefix cache. A prompt of n tokens takes n - 1 short
requests; they count in the metrics as what they are.
"""

from __future__ import annotations

import asyncio

from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.messages import TokenLogprob
from tokenspeed.runtime.sampling_params import SamplingParams


async def prompt_logprobs(llm: AsyncLLM, ids: list[int], top: int, cache_salt: str = "") -> list[TokenLogprob | None]:
    """One entry a token of `ids`, with the `top` best alternatives; None for the first. Raises EngineError."""

    async def score(at: int) -> TokenLogprob:
        params = SamplingParams(
            max_tokens=1, ignore_eos=True, allowed_token_ids=[ids[at]], logprobs=top, temperature=0.0, detokenize=False
        )
        stream = await llm.submit(ids[:at], params, cache_salt=cache_salt, wait=True)
        output = await stream.collect()
        assert output.logprobs is not None
        return output.logprobs[0]

    if len(ids) < 2:
        return [None] * len(ids)
    last = await score(len(ids) - 1)
    tasks = [asyncio.create_task(score(at)) for at in range(1, len(ids) - 1)]
    try:
        return [None, *await asyncio.gather(*tasks), last]
    finally:
        for task in tasks:
            task.cancel()
