"""Layers that draft: equal to transformers' layer with the projection before it and the norm behind it, as large as published, and
refused where they cannot be."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.compiler.test_compile_time import config
from tests.e2e.models import tiny_config, write_tiny
from tokenspeed import Engine
from tokenspeed.compiler import trial
from tokenspeed.compiler.api import Compiled, compile_model
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program
from tokenspeed.models import find_family
from tokenspeed.models.nn.config import ConfigError
from tokenspeed.runtime.checkpoint import SafetensorsCheckpoint, read_config
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.loader import load_weights

FULL = ["linear_attention", "linear_attention", "full_attention"]
#: family, and what makes the third of transformers' layers, which is read as the one that drafts
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepSeekMTPModel", {}),
    "deepseek_v32": ("DeepSeekMTPModel", {}),
    "glm4_moe": ("Glm4MoeMTPModel", {}),
    "qwen3_next": ("Qwen3NextMTP", {"layer_types": FULL}),
    "qwen3_5": ("Qwen3_5MTP", {"layer_types": FULL}),
}
LAYER = "model.layers.2"
#: names of its norms and its projection
OWN = {
    "qwen": ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc"],
    "other": [f"{LAYER}.{name}" for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj")],
}


def own(kind: str) -> list[str]:
    return OWN["qwen" if "qwen" in kind else "other"]


def write_drafting(path: Path, kind: str) -> Path:
    """A checkpoint of two layers and one that drafts; `path`/whole has all three as the model's."""
    write_tiny(path / "whole", kind, num_hidden_layers=3, **FAMILIES[kind][1])
    g = torch.Generator().manual_seed(1)
    *norms, projection = own(kind)
    mine = {f"{name}.weight": torch.randn(64, generator=g) / 8 for name in norms}
    mine = {name: x if "qwen" in kind else x + 1 for name, x in mine.items()}
    mine[f"{projection}.weight"] = torch.randn(64, 128, generator=g) / 8
    tensors = load_file(path / "whole" / "model.safetensors")
    if "qwen" in kind:
        tensors = {name.replace(LAYER, "mtp.layers.0"): x for name, x in tensors.items()}
    save_file(tensors | mine, path / "model.safetensors")
    c = json.loads((path / "whole" / "config.json").read_text())
    more: dict[str, Any] = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(c | more))
    return path


def reference(path: Path, kind: str, ids: list[int], hidden: Tensor) -> Tensor:
    """Logits behind every row, by transformers' own layer."""
    from transformers import AutoModelForCausalLM

    whole: Any = AutoModelForCausalLM.from_pretrained(path / "whole", dtype=torch.float32).model
    files = load_file(path / "model.safetensors")
    enorm, hnorm, last, projection = (files[f"{name}.weight"] for name in own(kind))

    def norm(x: Tensor, w: Tensor) -> Tensor:
        w = w + 1 if "qwen" in kind else w
        return w * x * (x.pow(2).mean(-1, keepdim=True) + whole.config.rms_norm_eps).rsqrt()

    with torch.no_grad():
        e = norm(files["model.embed_tokens.weight"][ids], enorm)
        x = torch.cat([e, norm(hidden, hnorm)], -1) @ projection.T
        whole.layers, whole.norm = nn.ModuleList([whole.layers[2]]), nn.Identity()
        if "qwen" in kind:
            whole.config.layer_types = FULL[2:]
        y = whole(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return norm(y, last) @ files["lm_head.weight"].T


def weights(done: Compiled, path: Path) -> dict[str, Tensor]:
    """What one rank reads of a checkpoint, as the simulator takes it: a tensor a segment."""
    held = load_weights(done.result.weights, SafetensorsCheckpoint(path), 0)
    out: dict[str, Tensor] = {}
    sizes = done.result.layout.sizes
    for e in done.result.weights.entries:
        start = 0
        x = held[e.name]
        assert isinstance(x, Tensor)
        for k, s in enumerate(e.segments):
            shape = s.type.shape(sizes)
            rows = math.prod(shape[: s.rows][1 if s.stacked else 0 :])
            part = x[:, start : start + rows] if s.stacked else x[start : start + rows]
            out[f"{e.name}:{k}"] = part.reshape(shape)
            start += rows
        out[e.name] = out.get(f"{e.name}:0", x)
    return out


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layer_that_drafts_equals_transformers(tmp_path: Path, kind: str) -> None:
    path = write_drafting(tmp_path / "model", kind)
    family = find_family(FAMILIES[kind][0])
    done = compile_model(family, read_config(path / "config.json"), buckets=[4, 24], max_rows=2, variants=["gumbel"])
    held = weights(done, path)
    ids = [(37 * i + 5) % 1003 for i in range(28)]
    want = reference(path, kind, ids, torch.stack([trial.hidden(1, i, 64) for i in range(28)]))
    caches: dict[str, list[Tensor]] = {}
    for first, last in ((0, 24), (24, 28)):  # a prompt, then rows that a step has verified; the last two may go on
        p = parse_program(done.result.texts["gumbel", last - first])
        step = [[(1, ids[first:last], first)]]
        results, env = Simulator(p, trial.runtime_sizes(p)).run(trial.batch(p, step), held, caches)
        right = want[last - 2 : last].double()
        assert torch.allclose(env["head"][0][:2, :1003], right, rtol=1e-4, atol=1e-4)
        assert [t for _, t in trial.outcomes(p, step, results[0])] == right.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("model", "family", "count"),
    [
        ("deepseek-v3", "DeepSeekMTPModel", 11_610_068_224),
        ("deepseek-v3.2", "DeepSeekMTPModel", 11_624_027_648),
        ("glm-4.5-air", "Glm4MoeMTPModel", 2_375_059_584),
        ("qwen3-next-80b-a3b", "Qwen3NextMTP", 1_650_471_424),
        ("qwen3.5-27b", "Qwen3_5MTP", 424_699_392),
        ("qwen3.5-35b-a3b", "Qwen3_5MTP", 844_640_768),
    ],
)
def test_the_layer_is_as_large_as_published(model: str, family: str, count: int) -> None:
    """Without the embedding and the head, which are the main model's."""
    done = compile_model(find_family(family), config(model), dtype="bfloat16", buckets=[1], variants=["gumbel"])
    m = done.result.weights
    own = [e for e in m.distinct() if e.name not in ("embed.w", "head.w")]
    assert sum(math.prod(m.extent(s)) for e in own for s in e.segments) == count


def test_rows_that_are_drafted_behind_are_a_dim_of_their_own() -> None:
    """Two a request, no more than there are tokens; what reads them follows an index into the tokens."""
    c = tiny_config("deepseek_v3").to_dict() | {"num_nextn_predict_layers": 1}
    done = compile_model(
        find_family("DeepSeekMTPModel"), c, mesh="dp=2,tp=2", buckets=[1, 4, 16], max_rows=4, variants=["gumbel"]
    )
    programs = [parse_program(text) for text in done.result.texts.values()]
    assert [p.bucket for p in programs] == [
        {"t": 1, "s": 1, "drafted": 1}, {"t": 4, "s": 4, "drafted": 4}, {"t": 16, "s": 4, "drafted": 8},
    ]  # fmt: skip
    assert str(programs[0].types["last"]) == "i32[drafted@dp -> t@dp]"
    assert json.loads(done.files["ports.json"])["rows"] == ["t", "s", "drafted"]


def test_a_drafting_layer_has_a_certificate_and_no_engine(tmp_path: Path) -> None:
    path = write_drafting(tmp_path / "model", "deepseek_v3")
    done = compile_model(
        find_family("DeepSeekMTPModel"), read_config(path / "config.json"), mesh="dp=2,tp=2", axes="ep=dp*tp,se=1", buckets=[1, 8],
        max_rows=2, checkpoint=SafetensorsCheckpoint(path).note(), certificate=True,
    )  # fmt: skip
    bodies = json.loads(done.files["certificate.json"])["bodies"]
    assert {b["variant"] for b in bodies} == {"gumbel", "full"} and all(b["tokens"] > 0 for b in bodies)
    done.write(tmp_path / "artifact")
    with pytest.raises(StartupError, match="drafts tokens behind the rows of another model"):
        Engine(model=str(tmp_path / "artifact"))


def test_several_layers_that_draft_are_refused() -> None:
    c = tiny_config("deepseek_v3").to_dict() | {"num_nextn_predict_layers": 2}
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=2"):
        compile_model(find_family("DeepSeekMTPModel"), c, buckets=[1], variants=["gumbel"])
