"""Counts and log-probabilities in OpenAI's shapes. Minus infinity, which JSON lacks, is MIN_LOGPROB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenspeed.runtime.messages import TokenLogprob
from tokenspeed.runtime.outputs import Completion, OutputDelta, Usage
from tokenspeed.runtime.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0


def usage_object(usages: Sequence[Usage]) -> dict[str, Any]:
    """The sum of the counts of some requests. Beside OpenAI's own fields it says in which tier cached tokens were."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "cached_tokens_details": {
                "device": sum(usage.cached_device for usage in usages),
                "host": sum(usage.cached_host for usage in usages),
                "storage": sum(usage.cached_storage for usage in usages),
            },
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
        },
    }


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """What a token is called in log-probabilities."""
    if tokenizer is None or token >= tokenizer.vocab_size:
        return f"token_id:{token}"
    return tokenizer.names[token]


def _token_bytes(tokenizer: Tokenizer | None, token: int) -> list[int] | None:
    if tokenizer is None or token >= tokenizer.vocab_size:
        return None
    return list(tokenizer.token_bytes[token])


def chat_logprobs(tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """{"content": one object a token}."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(tokenizer, token),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": _token_bytes(tokenizer, token),
        }

    return {
        "content": [
            {
                **entry(item.token_id, item.logprob),
                "top_logprobs": [entry(token, logprob) for token, logprob in zip(item.top_ids, item.top_logprobs)],
            }
            for item in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer | None, pieces: Sequence[str], entries: Sequence[TokenLogprob | None], offset: int
) -> dict[str, Any]:
    """tokens, token_logprobs, top_logprobs, text_offset: parallel lists; joined, the tokens are the text.

    `offset` is the number of characters before the first piece; an entry of None is a first token, which has none.
    """
    offsets: list[int] = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": list(pieces),
        "token_logprobs": [item and max(item.logprob, MIN_LOGPROB) for item in entries],
        "top_logprobs": [item and _top(tokenizer, item) for item in entries],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer | None, item: TokenLogprob) -> dict[str, float]:
    """The best tokens' log-probabilities by name, and the token's own."""
    pairs = [*zip(item.top_ids, item.top_logprobs), (item.token_id, item.logprob)]
    return {token_name(tokenizer, token): max(logprob, MIN_LOGPROB) for token, logprob in pairs}


def token_pieces(tokenizer: Tokenizer | None, part: Completion | OutputDelta) -> list[str]:
    """The text that each token of a part added; names where there is no text."""
    return part.pieces if tokenizer is not None else [token_name(None, token) for token in part.token_ids]
