"""Text to ids, and the bytes of every id.

Encoding is the `tokenizers` library's, which releases the GIL. Decoding is a table from id to bytes: the text of ids
is the UTF-8 of their bytes joined, so the incremental detokenizer and a decode of the whole agree by construction.
Byte-level and SentencePiece-style vocabularies have such a table; any other decoder is refused at load.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tokenspeed.runtime import detokenizer
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.gguf_metadata import find_embedded_model, read_metadata

log = logging.getLogger(__name__)

_SPACE = "\u2581"  # SentencePiece's mark of a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")  # what `Tokenizer.save` writes


class Tokenizer:
    """A vocabulary with its special tokens and the model's chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_ids: frozenset[int] = frozenset(),
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        """`special_tokens` are named as templates name them (bos_token, eos_token ...); `chat_templates` by use."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        bos, eos = (self.special_tokens.get(name) for name in ("bos_token", "eos_token"))
        self.bos_id: int | None = backend.token_to_id(bos) if bos else None
        eos_id = backend.token_to_id(eos) if eos else None
        self.eos_ids = eos_ids | ({eos_id} if eos_id is not None else set())
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._strips_space, self.token_bytes = _byte_table(backend)

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id."""
        return len(self.token_bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens spelled in the text are one id each. A leading BOS is never doubled.

        Raises UnicodeEncodeError for a text with lone surrogates.
        """
        text.encode("utf-8")
        # of a batch, since that lets other threads run meanwhile
        ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids that begin a sequence."""
        if skip_special_tokens:
            ids = [token for token in ids if token not in self.special_ids]
        return "".join(self.pieces(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text each id of a beginning sequence adds; a special token adds its name."""
        texts = detokenizer.pieces(self.token_bytes, ids)
        if self._strips_space:  # the space that encoding put before the first word
            first = next((i for i, token in enumerate(ids) if token not in self.special_ids), len(ids))
            texts[first : first + 1] = [piece.removeprefix(" ") for piece in texts[first : first + 1]]
        return texts

    @cached_property
    def names(self) -> list[str]:
        r"""How log-probabilities name each id: its text, or `bytes:\xe2\x80` for a part of a character."""
        return [_name(raw) for raw in self.token_bytes]

    @cached_property
    def special_by_text(self) -> dict[str, int]:
        """The ids of special tokens."""
        return {self.names[token]: token for token in self.special_ids if token < len(self.names)}

    def save(self, directory: Path) -> None:
        """Write it in the Hugging Face layout, so that `from_directory` gives an equal one."""
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = dict(self.special_tokens)
        if self.chat_templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
        _write_json(directory / "tokenizer_config.json", config)
        _write_json(directory / "generation_config.json", {"eos_token_id": sorted(self.eos_ids)})

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From tokenizer.json, tokenizer_config.json, generation_config.json, config.json, and chat templates in
        chat_template.jinja and additional_chat_templates/NAME.jinja.
        """
        file = path / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as fault:  # the library raises bare Exception
            raise StartupError(f"cannot read {file}: {fault}") from None
        config = _read_json(path / "tokenizer_config.json")
        specials = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
        eos = _eos_ids(path / "generation_config.json") or _eos_ids(path / "config.json")
        templates = config.get("chat_template") or {}
        if isinstance(templates, str):
            templates = {"default": templates}
        elif isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
        if (jinja := path / "chat_template.jinja").is_file():
            templates["default"] = jinja.read_text("utf-8")
        for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
            templates[file.stem] = file.read_text("utf-8")
        return cls(
            backend,
            special_tokens={name: value for name, value in specials.items() if value},
            eos_ids=frozenset(eos),
            chat_templates=templates,
        )

    @classmethod
    def from_gguf(cls, path: Path) -> Tokenizer:
        """From the metadata of a GGUF file."""
        from tokenspeed.runtime.gguf_tokenizer import build_backend

        metadata = read_metadata(path)
        backend = build_backend(metadata, str(path))
        tokens = metadata["tokenizer.ggml.tokens"]
        specials: dict[str, str] = {}
        for name in ("bos", "eos", "unknown", "padding"):
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token is not None:
                specials[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[token]
        ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        template = metadata.get("tokenizer.chat_template")
        return cls(
            backend,
            special_tokens=specials,
            eos_ids=frozenset(token for token in ends if token is not None),
            chat_templates={"default": template} if template else {},
        )


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer of a model (see EngineConfig.model, .tokenizer).

    None, with a warning, when a model directory has none: such a model takes and gives token ids only.
    Raises StartupError.
    """
    source = config.tokenizer or config.model
    if source == "smollm2":
        return Tokenizer.from_gguf(find_embedded_model())
    path = Path(source).expanduser()
    if ".py:" in source:
        path = Path(config.config).expanduser()
        path = path if path.is_dir() else path.parent
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(path)
    if not path.is_dir():
        server = "; a server is talked to with `tokenspeed chat --url URL`" if "://" in source else ""
        raise StartupError(
            f"{source} is no directory, .gguf file or `smollm2`: no model or tokenizer can be read there{server}"
        )
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_directory(path)
    if config.tokenizer:
        raise StartupError(f"no tokenizer.json in {path}")
    log.warning("no tokenizer.json in %s: the model takes and gives token ids only (see --tokenizer)", path)
    return None


def _byte_table(backend: tokenizers.Tokenizer) -> tuple[bool, list[bytes]]:
    """(whether decoding strips one space at the start, bytes by id; an id without a token has none)."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        alphabet, strips = byte_alphabet(), False
    elif "Metaspace" in kinds or {"Replace", "ByteFallback"} <= kinds:
        alphabet = None
        strips = "Strip" in kinds or any(step.get("prepend_scheme", "never") != "never" for step in steps)
    else:
        raise StartupError(
            f"tokenizer.json has the decoder {decoder.get('type')}: byte-level and SentencePiece-style are read"
        )
    added = backend.get_added_tokens_decoder()
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, token in vocab.items():
        if token in added:
            table[token] = added[token].content.encode("utf-8")
        elif alphabet is not None:
            try:
                table[token] = bytes([alphabet[char] for char in text])
            except KeyError:
                table[token] = text.encode("utf-8")
        elif match := _BYTE.fullmatch(text):
            table[token] = bytes([int(match[1], 16)])
        else:
            table[token] = text.replace(_SPACE, " ").encode("utf-8")
    return strips, table


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte (openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _name(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _content(value: Any) -> str | None:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _eos_ids(file: Path) -> list[int]:
    """The ids that end a sequence as a file of a checkpoint says, none if it does not; StartupError for what is no id."""
    given = _read_json(file).get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(i) is not int or i < 0 for i in ids):
        raise StartupError(f"{file}: eos_token_id is {given!r}: it must be a token id or a list of them")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as fault:
        raise StartupError(f"{path} is not valid JSON: {fault}") from None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", "utf-8")
