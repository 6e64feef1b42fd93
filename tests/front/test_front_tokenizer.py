"""Tokenizers out of a GGUF, a directory and back, against transformers' own conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from vocabularies import from_metadata, gpt2_metadata

from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.gguf_metadata import find_embedded_model, read_metadata
from tokenspeed.runtime.gguf_tokenizer import build_backend
from tokenspeed.runtime.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "Hello, world! It's 12345 o'clock; they'll DON'T",
    "  leading\t tabs\n\n\r\n and  runs   of spaces ",
    "def f(x):\n    return x ** 2  # 日本語 naïve café 😀 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x",
    "\u00a0\u3000x\u200b",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(find_embedded_model())


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_backend("llama", read_metadata(find_embedded_model()))


def reference_backend(architecture: str, metadata: dict[str, Any]) -> Any:
    """transformers' conversion of the same metadata (to the `tokenizers` object)."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    return convert_gguf_tokenizer(architecture, fields)[0]


def test_ids_equal_the_reference(smollm2: Tokenizer, reference: Any) -> None:
    for text in TEXTS:
        ids = smollm2.encode(text)
        assert ids == reference.encode(text).ids
        assert smollm2.decode(ids, skip_special_tokens=False) == text


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=200)
def test_every_text_comes_back(text: str) -> None:
    tokenizer = from_metadata(gpt2_metadata("llama-bpe"))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "".join(tokenizer.pieces(ids)) == text


def test_b91_each_special_token_is_one_id(smollm2: Tokenizer) -> None:  # sglang#3427
    metadata = read_metadata(find_embedded_model())
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in enumerate(types) if kind == 3]
    assert control and smollm2.special_ids == set(control)
    assert smollm2.encode("".join(tokens[token] for token in control)) == control


def test_digits_are_apart(smollm2: Tokenizer) -> None:
    assert [smollm2.names[token] for token in smollm2.encode("a1234 ½²")] == [*["a", "1", "2", "3", "4", " ", "½", "²"]]


def test_special_text_is_hidden_on_demand(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>hi<|im_end|>")
    assert smollm2.decode(ids) == "hi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_facts_of_the_embedded_model(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.eos_ids, smollm2.bos_id) == (49152, {2}, 1)
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert "SmolLM" in smollm2.chat_templates["default"]


def test_lone_surrogate_is_a_unicode_error(smollm2: Tokenizer) -> None:
    with pytest.raises(UnicodeError):
        smollm2.encode("a\ud800b")


def test_names_tell_parts_of_characters_apart(smollm2: Tokenizer) -> None:
    parts = smollm2.encode("😀")
    names = [smollm2.names[token] for token in parts]
    assert len(parts) > 1 and len(set(names)) == len(parts)
    assert any(name.startswith("bytes:\\x") for name in names)


# ---- made-up vocabularies ------------------------------------------------------------------------------------------


def test_b91_bos_comes_once() -> None:  # vllm#12985, llama.cpp#3966
    tokenizer = from_metadata(gpt2_metadata("gpt-2", add_bos_token=True))
    bos = tokenizer.bos_id
    assert tokenizer.encode("the") == [bos, 257]
    assert tokenizer.encode("<s>the") == [bos, 257]
    assert tokenizer.encode("<s>the", add_special_tokens=False) == [bos, 257]
    assert tokenizer.encode("the", add_special_tokens=False) == [257]
    assert from_metadata(gpt2_metadata("gpt-2")).encode("the") == [257]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "llama3", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_splits_equal_the_reference(pre: str) -> None:
    metadata = gpt2_metadata(pre)
    ours, theirs = build_backend(metadata, "test"), reference_backend("llama", metadata)
    assert ours.pre_tokenizer is not None
    for text in [*TEXTS, "year 1234567 it'S 9x ١٢٣", "camelCase HTTPServer a/b\n/"]:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def spm_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary: specials, bytes, letters, pieces with scores."""
    letters = ["▁", *"abcdehilnorstw"]
    words = ["▁t", "he", "▁the", "in", "ing", "▁a", "er", "on", "re", "th", "▁w", "or", "▁wor", "ld", "▁world"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_equals_the_reference() -> None:
    metadata = spm_metadata()
    reference = reference_backend("phi3", metadata)  # whose space prefix is SentencePiece's own, as in llama.cpp
    tokenizer = from_metadata(metadata)
    for text in ["the world", "  there in the word ", "hello é 日 x", "world</s>the", "a", ""]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)
        assert tokenizer.encode(text) == [1, *ids]


def test_sentencepiece_continuation_keeps_its_space() -> None:
    """The space that encoding puts first is stripped at the beginning of a sequence and nowhere else."""
    tokenizer = from_metadata(spm_metadata())
    ids = tokenizer.encode("the world")
    assert tokenizer.decode(ids) == "the world"
    assert tokenizer.token_bytes[ids[-1]] == b" world"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "pre-tokenizer 'martian'; known are"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'; read are gpt2, llama"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_unknown_kinds_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    metadata = {key: value for key, value in {**gpt2_metadata("gpt-2"), **change}.items() if value is not None}
    with pytest.raises(StartupError) as caught:
        build_backend(metadata, "x.gguf")
    assert says in str(caught.value) and "x.gguf" in str(caught.value)


# ---- files ---------------------------------------------------------------------------------------------------------


def test_saved_and_read_again_is_equal(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    for name in ("eos_ids", "special_ids", "special_tokens", "chat_templates", "bos_id", "token_bytes"):
        assert getattr(again, name) == getattr(smollm2, name)
    assert [again.encode(text) for text in TEXTS] == [smollm2.encode(text) for text in TEXTS]


def test_b16_end_of_sequence_ids_of_a_directory(smollm2: Tokenizer, tmp_path: Path) -> None:  # vllm#4589
    smollm2.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == {0, 2, 5}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == {2, 7}


@pytest.mark.parametrize("odd", ["2", -1, 2.0, True, [2, "3"], [None], {"id": 2}])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_odd_end_of_sequence_id_is_refused(smollm2: Tokenizer, tmp_path: Path, file: str, odd: Any) -> None:
    smollm2.save(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / file).write_text(json.dumps({"eos_token_id": odd}))
    with pytest.raises(StartupError, match=f"{file}: eos_token_id is"):
        Tokenizer.from_directory(tmp_path)


def test_a_template_file_wins_over_the_configuration(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ 'mine' }}")
    assert Tokenizer.from_directory(tmp_path).chat_templates["default"] == "{{ 'mine' }}"


def test_where_a_tokenizer_is_looked_for(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.save(tmp_path / "tok")
    (tmp_path / "bare").mkdir()
    assert load_tokenizer(EngineConfig(str(tmp_path / "bare"))) is None
    for config in (
        EngineConfig(str(tmp_path / "bare"), tokenizer=str(tmp_path / "tok")),
        EngineConfig("mine.py:Model", config=str(tmp_path / "tok" / "config.json")),
        EngineConfig(str(find_embedded_model())),
    ):
        tokenizer = load_tokenizer(config)
        assert tokenizer is not None and tokenizer.vocab_size == smollm2.vocab_size


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "/nowhere/at/all"}, "is no directory"),
        ({"model": "/nowhere/x.gguf"}, "cannot read /nowhere/x.gguf"),
        ({"model": "smollm2", "tokenizer": "{tmp}"}, "no tokenizer.json in"),
    ],
)
def test_a_missing_tokenizer_is_named(options: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        load_tokenizer(EngineConfig(**{key: value.format(tmp=tmp_path) for key, value in options.items()}))
    assert says in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 20, 100, 5000, 100_000])
def test_a_truncated_gguf_names_the_file(keep: int, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    with find_embedded_model().open("rb") as whole:
        broken.write_bytes(whole.read(keep))
    with pytest.raises(StartupError, match=r"broken\.gguf"):
        Tokenizer.from_gguf(broken)


def test_a_damaged_tokenizer_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    Backend(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match="has the decoder None"):
        Tokenizer.from_directory(tmp_path)
