"""A `tokenizers` tokenizer out of GGUF metadata, equal to the one the GGUF was made from.

`gpt2` vocabularies (byte-level BPE with merges) get the pre-tokenizer that `tokenizer.ggml.pre` names; `llama` ones
(SentencePiece BPE with scores) get merges rebuilt from the scores. Every control token is one id. An unknown model or
pre-tokenizer is refused by name: a wrong split would give wrong tokens silently.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenspeed.runtime.errors import StartupError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # ggml token types; 1 is a normal token

# The splits, as the models' own tokenizer.json files have them (llama.cpp src/llama-vocab.cpp names them).
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2(*, digits: bool) -> pre_tokenizers.PreTokenizer:
    """GPT-2's split; `digits` puts every digit apart first."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split]) if digits else split


def _regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> (pre-tokenizer, whether whole words in the vocabulary skip the merges, NFC normalisation)
_PRE = {
    "default": (_gpt2(digits=False), False, False),
    "gpt-2": (_gpt2(digits=False), False, False),
    "smollm": (_gpt2(digits=True), False, False),
    "starcoder": (_gpt2(digits=True), False, False),
    "llama-bpe": (_regex(_LLAMA3), True, False),
    "llama3": (_regex(_LLAMA3), True, False),
    "llama-v3": (_regex(_LLAMA3), True, False),
    "qwen2": (_regex(_QWEN2), False, True),
    "deepseek-r1-qwen": (_regex(_QWEN2), False, True),
    "tekken": (_regex(_TEKKEN), True, False),
}


def build_backend(metadata: dict[str, Any], source: str) -> Tokenizer:
    """The tokenizer of GGUF metadata (see gguf_metadata). Raises StartupError that names `source`."""
    missing = [key for key in ("model", "tokens") if f"tokenizer.ggml.{key}" not in metadata]
    if missing:
        raise StartupError(f"{source} has no tokenizer: the key tokenizer.ggml.{missing[0]} is missing")
    kind = metadata["tokenizer.ggml.model"]
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise StartupError(f"{source} has a tokenizer of kind {kind!r}; read are {', '.join(builders)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    backend = builders[kind](metadata, tokens, types, source)
    backend.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text, sort in zip(tokens, types) if sort == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(text, normalized=False) for text, sort in zip(tokens, types) if sort == _USER_DEFINED]
    )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        name = tokens[bos]
        single = [name, "$A"]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, f"{name}:1", "$B:1"], special_tokens=[(name, bos)]
        )
    return backend


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int], source: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise StartupError(f"{source} needs the pre-tokenizer {pre!r}; known are {', '.join(_PRE)}")
    split, ignore_merges, nfc = _PRE[pre]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {text: token for token, text in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], source: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise StartupError(f"{source} has no tokenizer.ggml.scores, which a SentencePiece vocabulary needs")
    vocab = {text: token for token, text in enumerate(tokens)}
    merges = _merges_from_scores(tokens, types, scores, vocab)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    tail: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return backend


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best; so a merge's rank is its result's."""
    merges: list[tuple[float, int, int, str, str]] = []
    for text, sort, score in zip(tokens, types, scores):
        if sort in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE):
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
