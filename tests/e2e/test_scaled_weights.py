"""Checkpoints with weights in FP8 blocks and in INT4 groups: every rank holds what the dequantised checkpoint gives it, and the
tokens are the same; what does not fit is refused with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.models import write_tiny
from tokenspeed import Engine, SamplingParams
from tokenspeed.compiler.api import compile_model
from tokenspeed.kernels.weights import QuantStack
from tokenspeed.models import find_family
from tokenspeed.runtime.checkpoint import SafetensorsCheckpoint
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.loader import load_weights

Tensors = dict[str, Tensor]
BLOCK = (16, 24)  # ends inside what ranks hold of most matrices
GROUP, KEPT = 4, 32  # of INT4: one that is dequantised, and one that may be kept


def fp8(name: str, w: Tensor) -> tuple[Tensors, Tensor]:
    """A weight in blocks, and the values that it stands for: each block by itself, the last ones short."""
    n, k = BLOCK
    stored, values = torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty_like(w)
    scales = torch.empty(-(-w.shape[0] // n), -(-w.shape[1] // k))
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        at = (slice(i * n, (i + 1) * n), slice(j * k, (j + 1) * k))
        scales[i, j] = w[at].abs().max() / 448
        stored[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
        values[at] = stored[at].float() * scales[i, j]
    return {name: stored, f"{name}_scale_inv": scales}, values


def int4(name: str, w: Tensor, group: int = GROUP) -> tuple[Tensors, Tensor]:
    """A weight in groups, packed value by value."""
    groups = w.unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 7).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1).int()
    words = torch.zeros(w.shape[0], -(-w.shape[1] // 8), dtype=torch.int32)
    for at in range(w.shape[1]):
        words[:, at // 8] |= (codes[:, at] + 8) << 4 * (at % 8)
    values = codes.float() * scales.float().repeat_interleave(group, 1)
    return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": torch.tensor(w.shape)}, values


KINDS: dict[str, tuple[Callable[[str, Tensor], tuple[Tensors, Tensor]], str, dict[str, Any]]] = {
    "fp8": (fp8, ".weight", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}),
    "int4": (int4, ".experts.", {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    "int4_32": (
        lambda name, w: int4(name, w, KEPT), ".experts.", {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
}  # fmt: skip


def per_expert(tensors: Tensors) -> Tensors:
    """The matrices of experts one by one, where they are stored as one tensor."""
    out: Tensors = {}
    for name, x in tensors.items():
        head, _, last = name.rpartition(".")
        if x.dim() == 3 and head.endswith(".experts"):
            for part, ws in zip(
                ("gate_proj", "up_proj") if "gate" in last else ("down_proj",), x.chunk(2 if "gate" in last else 1, 1)
            ):
                out |= {f"{head}.{e}.{part}.weight": w.contiguous() for e, w in enumerate(ws)}
        else:
            out[name] = x
    return out


def twins(path: Path, kind: str) -> tuple[Path, Path]:
    """A tiny mixture of experts with quantised matrices, and the same with the values that they stand for."""
    quantise, which, said = KINDS[kind]
    write_tiny(
        path / "plain", "deepseek_v3", num_hidden_layers=2, moe_intermediate_size=64 if kind == "int4_32" else 20
    )
    stored, plain = Tensors(), per_expert(load_file(path / "plain" / "model.safetensors"))
    for name, w in list(plain.items()):
        if w.dim() == 2 and ".layers." in name and which in name and name.endswith("proj.weight"):
            parts, plain[name] = quantise(name, w)
            stored |= parts
        else:
            stored[name] = w
    assert len(stored) > len(plain) + 20
    config = json.loads((path / "plain" / "config.json").read_text())
    (path / kind).mkdir()
    config["dtype"] = "float32"
    for at, tensors, more in ((path / "plain", plain, {}), (path / kind, stored, {"quantization_config": said})):
        save_file(tensors, at / "model.safetensors")
        (at / "config.json").write_text(json.dumps(config | more))
    return path / kind, path / "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_what_the_dequantised_checkpoint_gives_them(tmp_path: Path, kind: str) -> None:
    stored, plain = map(SafetensorsCheckpoint, twins(tmp_path, kind))
    assert set(stored.names()) == set(plain.names())
    family = find_family("DeepseekV3ForCausalLM")
    for mesh, axes in (("", ""), ("a=2,b=2", "tp=a*b,ep=a,etp=b")):
        made = compile_model(family, stored.config, mesh=mesh, axes=axes, buckets=[4], variants=["gumbel"])
        for rank in range(4 if mesh else 1):
            mine, theirs = (load_weights(made.result.weights, c, rank) for c in (stored, plain))
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_experts_in_groups_of_32_are_kept_with_their_scales(tmp_path: Path) -> None:
    stored, plain = map(SafetensorsCheckpoint, twins(tmp_path, "int4_32"))
    family = find_family("DeepseekV3ForCausalLM")
    options: dict[str, Any] = {"mesh": "a=2,b=2", "axes": "tp=a*b,ep=a,etp=b", "buckets": [4], "variants": ["gumbel"]}
    m = compile_model(family, stored.config, stored=stored.stored, **options).result.weights
    assert m.quantised == ["int4_32"]
    whole = compile_model(family, stored.config, **options).result.weights
    for rank in range(4):
        kept, numbers = load_weights(m, stored, rank), load_weights(whole, plain, rank)
        for name in ("layers.1.mlp.routed.w13", "layers.1.mlp.routed.w2"):
            assert isinstance(kept[name], QuantStack) and torch.equal(kept[name].dequantize(), numbers[name])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_dequantised_checkpoint(tmp_path: Path, kind: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [[(17 * i + 5 * k) % 1003 for k in range(3 + 9 * i)] for i in range(3)]
    found, paths = [], twins(tmp_path, kind)
    for path, dtype in ((paths[0], "auto"), (paths[0], "float32"), (paths[1], "float32")):
        with Engine(model=str(path), core="inproc", dtype=dtype, num_pages=64, buckets=[1, 4, 32]) as engine:
            found.append([r.token_ids for r in engine.generate(input_ids=prompts, sampling_params=greedy)])
    assert found[0] == found[1] == found[2]


DOWN = "model.layers.0.mlp.down_proj.weight"
EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"


@pytest.mark.parametrize(
    ("kind", "edit", "words"),
    [
        ("fp8", lambda t: t.pop(DOWN), f"{DOWN}_scale_inv' is there without '{DOWN}'"),
        ("fp8", lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(1, 1)}), f"{DOWN}' is stored as .* with scales \\[1, 1\\]"),
        ("fp8", lambda t: t.update({DOWN: t[DOWN].to(torch.float8_e5m2)}), f"{DOWN}' is stored as F8_E5M2"),
        ("fp8", lambda t: t[f"{DOWN}_scale_inv"].fill_(float("nan")), f"{DOWN}' is stored as values whose scales are NaN"),
        ("int4", lambda t: t[f"{EXPERT}_scale"].fill_(float("inf")), f"{EXPERT}' is stored as values whose scales are NaN"),
        ("int4", lambda t: t.update({EXPERT: torch.ones(64, 20)}), f"{EXPERT}' is there twice"),
        ("int4", lambda t: t.update({f"{EXPERT}_scale": torch.ones(64)}), f"{EXPERT}' is stored as .* with scales \\[64\\]"),
        ("int4", lambda t: t.update({f"{EXPERT}_shape": torch.tensor(64)}), f"{EXPERT}' is stored as .* a weight \\[\\]"),
        ("int4", lambda t: t.pop(f"{EXPERT}_scale"), f"is there without '{EXPERT}_scale'"),
        ("int4", lambda t: t.update({f"{EXPERT}_zero_point": torch.zeros(1)}), "weights with zero points"),
        ("int4", lambda t: t.update({f"{EXPERT}_shape": torch.tensor([64, 21])}), f"{EXPERT}' is stored as .* a weight \\[64, 21\\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, kind: str, edit: Callable[[Tensors], Any], words: str) -> None:
    path, _ = twins(tmp_path, kind)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(StartupError, match=words):
        c = SafetensorsCheckpoint(path)
        shape = (64, 96) if kind == "fp8" else (64, 20)
        c.matrix(DOWN if kind == "fp8" else EXPERT, (3, 40), shape)


def scheme(**changes: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it, with other words about the weights."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "actorder": None,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights | changes}}}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (scheme(), ""),
        (scheme(num_bits=8), "num_bits 8; only 4 is read"),
        (scheme(symmetric=False), "symmetric False; only True is read"),
        (scheme(strategy="channel"), "strategy 'channel'"),
        (scheme(group_size=2 * GROUP), f"with scales of groups of {2 * GROUP}"),
        (scheme(group_size="many"), "group_size 'many'"),
        ({"config_groups": {"group_0": 3}}, "config_groups holds 3"),
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ("int4", "quantization_config is 'int4'"),
    ],
)
def test_a_configuration_that_says_another_form_is_refused(tmp_path: Path, said: Any, words: str) -> None:
    path, _ = twins(tmp_path, "int4")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    c = SafetensorsCheckpoint(path)
    if not words:
        assert len(torch.as_tensor(c.matrix(EXPERT, (3, 40), (64, 20)))) == 37
        return
    with pytest.raises(StartupError, match=words):
        c.matrix(EXPERT, (3, 40), (64, 20))
