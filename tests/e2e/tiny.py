"""Tiny checkpoints made without transformers (which takes seconds to import), and the real server as a process.

A vocabulary of 301: the 256 bytes, then control tokens and words; so a prompt's length in tokens is its length in bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tokenspeed.runtime.tokenizer import byte_alphabet

ROOT = Path(__file__).parents[2]
VOCAB = 301
BOS, EOS, START, END = "<s>", "</s>", "<|start|>", "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(kind: str = "llama", **over: Any) -> dict[str, Any]:
    """A config.json: 4 query heads of 16 on 2 KV heads, two layers. A value of None leaves the field out."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]], "model_type": kind, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    return {k: v for k, v in (config | over).items() if v is not None}


def tiny_weights(config: dict[str, Any], seed: int = 0, head: bool | None = None) -> dict[str, Tensor]:
    """Random float32 tensors by Hugging Face name. `head`: whether lm_head is among them (None: where it is untied)."""
    g = torch.Generator().manual_seed(seed)
    h, f, v, d = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=g) * (2.0 / columns**0.5)

    def norm(n: int) -> Tensor:
        return 1 + 0.2 * torch.randn(n, generator=g)

    out = {"model.embed_tokens.weight": torch.randn(v, h, generator=g), "model.norm.weight": norm(h)}
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, Tensor] = {
            "input_layernorm": norm(h), "post_attention_layernorm": norm(h), "self_attn.q_proj": matrix(q, h),
            "self_attn.k_proj": matrix(kv, h), "self_attn.v_proj": matrix(kv, h), "self_attn.o_proj": matrix(h, q),
            "mlp.gate_proj": matrix(f, h), "mlp.up_proj": matrix(f, h), "mlp.down_proj": matrix(h, f),
        }  # fmt: skip
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": norm(d), "self_attn.k_norm": norm(d)}
        out |= {f"model.layers.{i}.{name}.weight": t for name, t in layer.items()}
        if config["model_type"] == "qwen2":
            biases = {"q": q, "k": kv, "v": kv}
            out |= {
                f"model.layers.{i}.self_attn.{p}_proj.bias": torch.randn(n, generator=g) / 4 for p, n in biases.items()
            }
    if head if head is not None else not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(v, h)
    return out


def tiny_tokenizer() -> Tokenizer:
    """Bytes 0..255, BOS, EOS and the chat marks as control tokens, then words that no merge makes."""
    words = [*byte_alphabet(), BOS, EOS, START, END]
    words += [f"word{i}" for i in range(VOCAB - len(words))]
    backend = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(w, normalized=False, special=True) for w in (BOS, EOS, START, END)])
    return backend


def save_tokenizer(path: Path) -> None:
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def save_model(
    path: Path, config: dict[str, Any], weights: dict[str, Tensor], *, shards: int = 1, tokenizer: bool = False
) -> Path:
    """A Hugging Face directory; with more than one shard an index and `model-0000i-of-0000n.safetensors`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer:
        save_tokenizer(path)
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({n: weights[n] for n in names if where[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def tiny_model(path: Path, kind: str = "llama", seed: int = 0, tokenizer: bool = False, **over: Any) -> Path:
    """A random model's directory."""
    config = tiny_config(kind, **over)
    return save_model(path, config, tiny_weights(config, seed), tokenizer=tokenizer)


def tokenspeed(*arguments: object, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m tokenspeed ...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tokenspeed", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, env=environment(**environ), cwd=cwd,
    )  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """This process's, with the repository importable and lines that are not wrapped."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "500", **more}


class Server:
    """`tokenspeed serve MODEL --port 0 ...` as a process; standard error is collected in `log`."""

    def __init__(self, *arguments: object, **environ: str) -> None:
        self.log: list[str] = []
        self.url = ""
        self._listening, self._ended = threading.Event(), threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed", "serve", *map(str, arguments), "--port", "0"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(**environ),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if not self.url and (found := re.search(r"listening on (http://[\w.]+:\d+)", line)):
                self.url = found[1]
                self._listening.set()
        self._ended.set()
        self._listening.set()

    def ready(self, timeout: float = 90) -> Server:
        """Waits until it can take requests."""
        deadline = time.monotonic() + timeout
        assert self._listening.wait(timeout), "the server does not listen"
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return self
            time.sleep(0.02)
        raise AssertionError("the server did not come up:\n" + "".join(self.log))

    def end(self, timeout: float = 90) -> tuple[int, str]:
        """(exit status, standard error) once it has ended by itself."""
        status = self.process.wait(timeout)
        self._ended.wait(10)
        return status, "".join(self.log)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)

    def metric(self, name: str) -> float:
        """The value of a Prometheus sample, labels ignored."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(name) and line[len(name)] in "{ ":
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def finished(self) -> dict[str, int]:
        """Requests that have ended, by reason."""
        text = httpx.get(f"{self.url}/metrics").text
        rows = re.findall(r'request_success_total\{.*finished_reason="(\w+)".*\} (\S+)', text)
        return {reason: int(float(count)) for reason, count in rows}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
