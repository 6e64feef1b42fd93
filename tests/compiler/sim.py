"""Helpers of the compiler's tests: tiny configurations, random global weights, one step through the n-rank simulator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler.costs import CostModel, load_costs
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.ops.sampling import PARAM_WORDS, Flag, Word
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program
from tokenspeed.models import find_family
from tokenspeed.models.nn import Config

torch.set_num_threads(1)  # small tensors: threads cost ten times what they save
PAGE, PAGES, WIDTH = 4, 16, 8  # KV pages a home group, and columns of the block table


def tiny(arch: str = "LlamaForCausalLM", **over: Any) -> dict[str, Any]:
    """A small configuration: 8 query heads on 2 KV heads, a vocabulary that divides by nothing."""
    return {
        "architectures": [arch], "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 1003, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "hidden_act": "silu",
    } | over  # fmt: skip


def compile_tiny(
    config: dict[str, Any], mesh: str = "", axes: str = "", buckets: list[tuple[int, int]] | None = None,
    costs: str | CostModel = "cpu", variants: tuple[str, ...] = ("gumbel", "full"), **request: Any,
) -> Result:  # fmt: skip
    table = load_costs(costs) if isinstance(costs, str) else costs
    family = find_family(config["architectures"][0])
    plan = make_plan(parse_mesh(mesh), axes)
    return run_passes(
        Request(family, Config(config), plan, buckets or [(8, 8)], "f32", "f32", table, variants=variants, **request)
    )


def random_weights(r: Result, seed: int = 0) -> dict[str, Tensor]:
    """Global padded weights by `name:segment`; equal on every plan, the padding zero."""
    out: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    m = r.weights
    for e in m.entries:
        if e.kind == "rope":
            assert e.attrs
            inv = 1.0 / 10000.0 ** (torch.arange(0, e.attrs["dim"], 2) / e.attrs["dim"])
            angle = torch.arange(e.attrs["positions"])[:, None] * inv
            out[e.name] = torch.cat([angle.cos(), angle.sin()], 1)
            continue
        for k, seg in enumerate(e.segments):
            shape = [m.logical[d.name] for d in seg.type.dims]
            source = seg.sources[0]
            if source not in made:
                g = torch.Generator().manual_seed(seed * 1000003 + sum(map(ord, source)))
                scale = 1.0 if len(shape) == 1 else 1.0 / math.sqrt(math.prod(shape[seg.rows :]))
                made[source] = torch.randn(shape, generator=g) * scale + (1.0 if "norm" in source else 0.0)
            full = torch.zeros([m.sizes[d.name] for d in seg.type.dims])
            view, src = full, made[source]
            for dim, d in enumerate(seg.type.dims):
                index = torch.cat([torch.arange(b, b + n) for _, b, n in m.dim_runs(d.name)])
                if dim == 0:
                    rows = index
                else:
                    assert index.numel() == m.logical[d.name]
                    src = _spread(src, dim, index, m.sizes[d.name])
            view[rows] = src
            out[f"{e.name}:{k}"] = full
            if len(e.segments) == 1:
                out[e.name] = full
    return out


def _spread(x: Tensor, dim: int, index: Tensor, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return torch.zeros(shape).index_copy(dim, index, x)


class Steps:
    """Prefills and decodes requests on a simulated plan: requests pinned to home groups, buckets padded with holes."""

    def __init__(self, r: Result, weights: dict[str, Tensor], variant: str = "gumbel", poison: bool = True) -> None:
        self.r, self.weights, self.variant, self.poison = r, weights, variant, poison
        self.groups = r.layout.plan.mesh.size(r.layout.plan.home)
        self.caches: dict[str, list[Tensor]] = {}

    def step(
        self, bucket: int, work: list[list[tuple[int, list[int], int]]], seeds: list[int] | None = None
    ) -> list[list[int]]:
        """`work[g]`: (request number, ids, first position) of home group g; returns the sampled token of each."""
        text = self.r.texts[self.variant, bucket]
        p = parse_program(text)
        rows = p.bucket["s"]
        runtime = {
            "slots": PAGE * PAGES * self.groups,
            "page": PAGE,
            "l": WIDTH,
            "p": PARAM_WORDS,
            "r": rows * self.groups,
            "top": 20,
        }
        ports = {n: torch.full((bucket * self.groups,), -1, dtype=torch.int32) for n in ("ids", "pos", "slot", "row")}
        ports["table"] = torch.zeros(rows * self.groups, WIDTH, dtype=torch.int32)
        ports["last"] = torch.full((rows * self.groups,), -1, dtype=torch.int32)
        params = torch.zeros(rows * self.groups, PARAM_WORDS, dtype=torch.int32)
        params[:, Word.FLAGS] = int(Flag.GREEDY)
        for g, requests in enumerate(work):
            at = g * bucket
            for i, (number, ids, first) in enumerate(requests):
                pages = [(number * 5 + k) % PAGES for k in range(WIDTH)]
                ports["table"][g * rows + i] = torch.tensor(pages, dtype=torch.int32)
                for k, token in enumerate(ids):
                    pos = first + k
                    ports["ids"][at], ports["pos"][at], ports["row"][at] = token, pos, i
                    ports["slot"][at] = pages[pos // PAGE] * PAGE + pos % PAGE
                    at += 1
                ports["last"][g * rows + i] = at - 1 - g * bucket
                flags = Flag.VALID | (Flag.GREEDY if seeds is None else 0)
                row = params[g * rows + i]
                row[Word.FLAGS], row[Word.POSITION] = int(flags), first + len(ids)
                row[Word.SEED_LO], row[Word.SLOT] = (seeds[number] if seeds else 0), i
                floats = torch.tensor([0.8, 1.0, 0.0, 1.0, 0.0, 0.0]).view(torch.int32)
                row[Word.TEMPERATURE] = floats[0]
                row[Word.TOP_P], row[Word.REPETITION] = floats[1], floats[3]
        ports["params"] = params
        sim = Simulator(p, runtime)
        results, _ = sim.run(ports, self.weights, self.caches)
        return [[int(results[0][g * rows + i]) for i in range(len(work[g]))] for g in range(self.groups)]
