"""Experts in MXFP4: what a checkpoint of gpt-oss holds, against the gguf package's and transformers' reading of it; kept in
memory as it is stored, or dequantised by a named dtype; sharded with its scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.models import disagreements, write_tiny
from tokenspeed import Engine, SamplingParams
from tokenspeed.compiler.api import compile_model
from tokenspeed.kernels.weights import QuantStack, QuantWeight, mxfp4_of
from tokenspeed.models import find_family
from tokenspeed.runtime.checkpoint import SafetensorsCheckpoint
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.loader import load_weights

KIND = gguf.GGMLQuantizationType.MXFP4


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks u8 [.., N, K/32, 16] and scales u8 [.., N, K/32] as checkpoints have them, and the values they stand for."""
    raw = gguf.quants.quantize(weight.numpy(), KIND)
    values = torch.from_numpy(gguf.quants.dequantize(raw, KIND))
    packed = torch.from_numpy(raw).unflatten(-1, (-1, 17))
    codes = torch.cat([packed[..., 1:] & 15, packed[..., 1:] >> 4], -1)
    return codes[..., ::2] | (codes[..., 1::2] << 4), packed[..., 0].contiguous(), values


def mxfp4_model(path: Path, **over: Any) -> Path:
    """A tiny gpt-oss with its experts in MXFP4."""
    write_tiny(path, "gpt_oss", **over)
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, _ = quantised(tensors.pop(name).transpose(1, 2).contiguous())
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_block_is_what_gguf_reads() -> None:
    weight = torch.randn(7, 96) * torch.logspace(-6, 6, 7)[:, None]
    blocks, scales, values = quantised(weight)
    assert torch.equal(mxfp4_of(blocks, scales).dequantize(), values)
    raw = torch.from_numpy(gguf.quants.quantize(weight.numpy(), KIND))
    assert torch.equal(QuantWeight(raw, "mxfp4", (7, 96)).dequantize(), values)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_tokens_equal_those_of_transformers(tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    path = mxfp4_model(tmp_path)
    prompts = [[(17 * i + 5 * k) % 1003 for k in range(3 + 9 * i)] for i in range(6)]
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with Engine(
        model=str(path), core="inproc", dtype=dtype, max_num_seqs=4, max_num_batched_tokens=32, num_pages=100
    ) as e:
        outputs = [r.token_ids for r in e.generate(input_ids=prompts, sampling_params=greedy)]
    whole = Mxfp4Config(dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(path, quantization_config=whole, dtype=torch.float32)
    assert disagreements(reference, prompts, outputs) == (0, 0)


def test_a_rank_holds_its_experts_and_blocks_with_their_scales(tmp_path: Path) -> None:
    files = SafetensorsCheckpoint(mxfp4_model(tmp_path, num_hidden_layers=1))
    family = find_family("GptOssForCausalLM")
    options: dict[str, Any] = {"mesh": "a=2,b=2", "axes": "tp=a*b,ep=a,etp=b", "buckets": [4], "stored": files.stored}
    m = compile_model(family, files.config, **options).result.weights
    assert m.quantised == ["mxfp4"]
    plain = compile_model(family, files.config, **options | {"stored": lambda _: None}).result.weights
    for rank in range(4):
        kept, numbers = load_weights(m, files, rank), load_weights(plain, files, rank)
        for name in ("layers.0.mlp.w13", "layers.0.mlp.w2"):
            assert isinstance(kept[name], QuantStack) and torch.equal(kept[name].dequantize(), numbers[name])
        assert torch.equal(kept["layers.0.mlp.w13.bias"], numbers["layers.0.mlp.w13.bias"])
        assert kept["layers.0.mlp.w13"].shape == (4, 64, 64) and kept["layers.0.mlp.w2"].shape == (4, 64, 32)
        assert bool(kept["layers.0.mlp.w2.bias"].any()) == (rank % 2 == 0)  # pending over b: its first rank keeps it


def test_widths_that_end_inside_a_block_are_dequantised(tmp_path: Path) -> None:
    files = SafetensorsCheckpoint(mxfp4_model(tmp_path, num_hidden_layers=1))
    m = compile_model(
        find_family("GptOssForCausalLM"),
        files.config,
        mesh="tp=4",
        axes="ep=1,etp=tp",
        buckets=[4],
        stored=files.stored,
    ).result.weights
    kept = {e.name: e.segments[0].type.dtype for e in m.entries if ".mlp.w" in e.name and "bias" not in e.name}
    assert kept == {"layers.0.mlp.w13": "mxfp4", "layers.0.mlp.w2": "f32"}
    assert load_weights(m, files, 1)["layers.0.mlp.w2"].shape == (8, 64, 16)


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    path = mxfp4_model(tmp_path, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, path / "model.safetensors")
    with (
        pytest.raises(StartupError, match="down_proj_blocks' is stored as U8"),
        Engine(model=str(path), core="inproc"),
    ):
        pass
