"""Small vocabularies that are made up for tests."""

from __future__ import annotations

from typing import Any

from tokenspeed.runtime.gguf_tokenizer import build_backend
from tokenspeed.runtime.tokenizer import Tokenizer, byte_alphabet


def gpt2_metadata(pre: str, **more: Any) -> dict[str, Any]:
    """A byte-level vocabulary of the 256 bytes, a few words and two control tokens."""
    tokens = [*byte_alphabet(), "th", "the", "Ġthe", "<s>", "</s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    bos = metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.bos_token_id"]]
    return Tokenizer(build_backend(metadata, "test"), special_tokens={"bos_token": bos})
