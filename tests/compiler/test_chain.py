"""What lies between two attentions as one call: where a target has a kernel for it, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiler.sim import tiny
from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.binding import key_of
from tokenspeed.compiler.calls import flatten
from tokenspeed.ir.graph import Program
from tokenspeed.ir.text import parse_program
from tokenspeed.models import find_family

WIDE = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 192,
    "num_hidden_layers": 3,
}  # fmt: skip


def _calls(over: dict[str, Any], bucket: int, mesh: str = "", family: str = "", device: str = "cuda:90") -> list[str]:
    c = tiny() | WIDE | over
    done = compile_model(
        find_family(family or c["architectures"][0]), c, mesh=mesh, buckets=[4, 16, 32], dtype="bfloat16",
        cache_dtype="bfloat16", device=device,
    )  # fmt: skip
    kernels = done.files["kernels.json"]  # JSON, request keys in it
    p: Program = parse_program(done.result.texts["gumbel", bucket])
    return [c.node.op for c in flatten(p, lambda c: f'"{key_of(*c.request)}"' in kernels)]


@pytest.mark.parametrize("bucket", [4, 16])
def test_every_layer_but_the_last_is_chained_to_the_next(bucket: int) -> None:
    ops = _calls({}, bucket)
    assert ops.count("linear_chain") == 2
    assert ops.count("attend") == 3 and ops.count("linear_silu_mul") == 1  # the last layer's own


@pytest.mark.parametrize(
    ("over", "bucket", "more"),
    [
        ({}, 32, {}),
        ({}, 4, {"mesh": "tp=2"}),
        ({}, 4, {"device": "cpu"}),
        ({}, 4, {"device": "cuda:80"}),
        ({}, 4, {"family": "Qwen2ForCausalLM"}),
        ({"intermediate_size": 160}, 4, {}),
    ],
    ids=["many rows", "a collective between", "a CPU", "another GPU", "a bias", "a width TMA cannot cut"],
)  # fmt: skip
def test_where_the_kernel_does_not_fit_nothing_is_chained(
    over: dict[str, Any], bucket: int, more: dict[str, Any]
) -> None:
    ops = _calls(over, bucket, **more)
    assert "linear_chain" not in ops and "attend" in ops
