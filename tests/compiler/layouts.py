"""Legal layouts of 2, 4, 6 and 8 ranks, models to lay out, and one trial: bucket edges on a layout against one rank.

    python -m tests.compiler.layouts [--sample N] [--seed S] [--jobs N] [--part I/N]

Invariant: a trial gives every request the same number, tokens and seed on every layout; what one rank computes is computed
once a model and shape of work.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenspeed.compiler import trial
from tokenspeed.compiler.costs import CostModel, load_costs
from tokenspeed.compiler.exchange import CALLS as EXCHANGE
from tokenspeed.compiler.fuzz import random_costs
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.ir.jobs import add_jobs, add_part, each, part_of
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program
from tokenspeed.models import find_family
from tokenspeed.models.llama import Attention, CausalLM, Layer
from tokenspeed.models.nn import Batch, Config, Module, RMSNorm, Rope, Routed, Routing, Shared, Stream
from tokenspeed.models.nn import Mixture as Experts
from tokenspeed.models.nn.decoder import decoder_dims

GROUPED = Routing(3, score="sigmoid", groups=4, top_groups=2, group_best=2, scale=1.5)


class MixedLayer(Module):
    def __init__(self, c: Config, rope: Rope) -> None:
        self.norm1, self.norm2 = RMSNorm("h", c.rms_norm_eps), RMSNorm("h", c.rms_norm_eps)
        self.attn, self.mix = Attention(c, rope), Experts(Routed(GROUPED, bias=True), Shared())

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.attn(self.norm1(x), b)
        return x + self.mix(self.norm2(x))


class Mixture(CausalLM):
    """A dense first layer, then one of routed experts beside a shared one, as the larger families have them."""

    dims = staticmethod(lambda c: decoder_dims(c) | {"e": 24, "k": 3, "fe": 6, "fs": 10})

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.layers = [Layer(c, self.rope), MixedLayer(c, self.rope)]


MODELS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Mixture",
    "Gemma3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepSeekMTPModel",
    "Glm4MoeMTPModel",
    "GptOssForCausalLM",
    "Glm4MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MTP",
)
EXPERTS_ALONE = (
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "DeepSeekMTPModel",
    "Glm4MoeMTPModel",
)  # no layer has a dense MLP
EXPERTS = (
    "Qwen3MoeForCausalLM", "Mixture", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
    "DeepSeekMTPModel", "Glm4MoeMTPModel", "Glm4MoeForCausalLM", "Qwen3NextForCausalLM", *EXPERTS_ALONE,
)  # fmt: skip
NAMED = {
    "attention TP2 x DP2, experts TP4": ("dp=2,tp=2", "ep=1,etp=dp*tp,se=dp*tp"),
    "attention TP2 x DP2, experts EP4": ("dp=2,tp=2", "ep=dp*tp,etp=1,se=1"),
    "attention TP2 x DP2, experts EP2 x TP2": ("dp=2,tp=2", "ep=dp,etp=tp,se=tp"),
    "attention TP4, dense TP2": ("a=2,b=2", "tp=a*b,mlp=b,ep=b,etp=a,se=b"),
    "attention TP4, dense first layer TP1, experts TP4": ("tp=4", "mlp=1,ep=1,etp=tp,se=tp"),
    "attention DP4, dense first layer TP4": ("dp=4", "mlp=dp,ep=dp,etp=1,se=1"),
}


_DEEPSEEK = {
    "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 12,
    "linear_key_head_dim": 4, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5,
}  # fmt: skip
#: what a family's configuration has beside the common fields, or otherwise
OWN: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK | {"norm_topk_prob": False, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": _DEEPSEEK | {"q_lora_rank": 5},
    "DeepseekV32ForCausalLM": _DEEPSEEK | {
        "q_lora_rank": 5, "index_n_heads": 3, "index_head_dim": 4, "index_topk": 3,
    },
    "DeepSeekMTPModel": _DEEPSEEK | {"q_lora_rank": 5, "num_nextn_predict_layers": 1},
    "Gemma3ForCausalLM": {
        "sliding_window": 3, "sliding_window_pattern": 2, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0, "rope_local_base_freq": 100.0,
    },
    "GptOssForCausalLM": {"sliding_window": 3, "swiglu_limit": 0.5, "attention_bias": True},
    "Glm4MoeMTPModel": {"n_group": 6, "topk_group": 2, "num_nextn_predict_layers": 1},
    "Glm4MoeForCausalLM": {"n_group": 6, "topk_group": 2, "routed_scaling_factor": 1.5, "attention_bias": True},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 2},
    "MistralForCausalLM": {"sliding_window": 4},
    "Qwen3NextForCausalLM": _DELTA | {"shared_expert_intermediate_size": 10},
    "Qwen3_5MTP": _DELTA | {
        "num_experts": None, "linear_num_key_heads": 1, "linear_num_value_heads": 6, "mtp_num_hidden_layers": 1,
    },
    "Qwen3_5ForCausalLM": _DELTA | {"linear_num_key_heads": 1, "linear_num_value_heads": 6},
}  # fmt: skip


@functools.cache
def config(model: str) -> dict[str, Any]:
    return {
        "architectures": [model], "hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
        "intermediate_size": 20, "vocab_size": 61, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "hidden_act": "silu", "attention_bias": model == "MistralForCausalLM",
        "mlp_bias": model == "MistralForCausalLM", "num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 6,
        "norm_topk_prob": True, "mlp_only_layers": [0],
    } | OWN.get(model, {})  # fmt: skip


def layouts(ranks: int, model: str) -> Iterator[tuple[str, str]]:
    """(mesh, axes): dp of every size, the rest in one axis or two, which tp or cp takes, or one each; and mlp, vp (ep) on any
    product of mesh axes; the width of experts whole, or on the axes that ep leaves; a shared expert and the vocabulary beside
    them on one product after the other."""
    count = itertools.count()
    for dp in (d for d in range(1, ranks + 1) if ranks % d == 0):
        rest = ranks // dp
        splits = [(rest,)] + ([(2, rest // 2)] if rest % 2 == 0 and rest > 2 else [])  # the 2 KV heads end on an axis
        for split in splits:
            inner = [(n, s) for n, s in zip("ab", split) if s > 1]
            names = (["dp"] if dp > 1 else []) + [n for n, _ in inner]
            products = ["1"] + ["*".join(p) for k in range(1, len(names) + 1) for p in itertools.permutations(names, k)]
            free = ("mlp", "ep") if model in EXPERTS else ("mlp", "vp")
            free = ("vp", "ep") if model in EXPERTS_ALONE else free
            every = "*".join(n for n, _ in inner) or "1"
            heads = [(every, "1"), ("1", every)][: len(inner) + 1] + (
                [("a", "1"), ("a", "b")] if len(inner) > 1 else []
            )
            mesh = ",".join(([f"dp={dp}"] if dp > 1 else []) + [f"{n}={s}" for n, s in inner])
            for (tp, cp), *maps in itertools.product(heads, *([products] * len(free))):
                left = "*".join(n for n in names if n not in maps[1].split("*")) or "1"
                for etp in dict.fromkeys(("1", left)) if model in EXPERTS else ("",):
                    used = set("*".join([tp, cp, *maps, etp, "dp"]).split("*"))
                    if set(names) <= used:
                        i = next(count)
                        others = (f"se={products[i % len(products)]}", f"vp={products[i // 2 % len(products)]}")
                        beside = 2 if model in EXPERTS_ALONE else 1 if model == "Qwen3MoeForCausalLM" else 0
                        inside = [f"etp={etp}", *others[beside:]] if etp else []
                        yield (
                            mesh,
                            ",".join(
                                [
                                    f"tp={tp}",
                                    *([f"cp={cp}"] if cp != "1" else []),
                                    *(f"{a}={m}" for a, m in zip(free, maps)),
                                    *inside,
                                ]
                            ),
                        )


#: trials that a process gets at a time: neighbours compare with the same runs on one rank, which each process makes once
CHUNK = 32


@dataclass(frozen=True)
class Trial:
    model: str
    mesh: str
    axes: str
    seed: int  # of the prices


def trials(sample: int | None, seed: int) -> list[Trial]:
    """All models on all layouts of 2, 4, 6 and 8 ranks, or a seeded sample of `sample` of them."""
    rng = random.Random(seed)
    found = [(m, *at) for m in MODELS for n in (2, 4, 6, 8) for at in layouts(n, m)]
    if sample is not None:  # as many of each model and size
        pools = [[(m, *at) for at in layouts(n, m)] for m in MODELS for n in (2, 4, 6, 8)]
        found = [rng.choice(pools[i % len(pools)]) for i in range(sample)]
    return [Trial(*f, seed=rng.randrange(1 << 30)) for f in found]


_family = functools.cache(find_family)


def compiled(model: str, mesh: str, axes: str, buckets: list[tuple[int, int]], costs: CostModel) -> Result:
    plan = make_plan(parse_mesh(mesh), axes)
    family = Mixture if model == "Mixture" else _family(model)
    request = Request(
        family, Config(config(model)), plan, buckets, "f32", "f32", costs, variants=("gumbel",), collectives=frozenset(EXCHANGE),
    )  # fmt: skip
    return run_passes(request)


def work(groups: int, tokens: int, idle: bool) -> list[list[trial.Request]]:
    """Two requests a home group that fill `tokens` rows (one where there is one row); with `idle` the last group has none."""
    out: list[list[trial.Request]] = []
    for g in range(groups):
        lengths = [tokens] if tokens == 1 else [tokens - tokens // 2, tokens // 2]
        requests = [(2 * g + i, [(7 * g + 3 * i + 5 * k) % 61 for k in range(n)], 0) for i, n in enumerate(lengths)]
        out.append([] if idle and g == groups - 1 else requests)
    return out


class Bench:
    """The programs of one model on one layout, read back once each, and its weights, laid out once."""

    def __init__(self, r: Result) -> None:
        self.texts = {bucket: text for (_, bucket), text in r.texts.items()}
        self.weights, self.moved = trial.random_weights(r.weights), {}
        self.sims: dict[int, Simulator] = {}

    def sim(self, bucket: int) -> Simulator:
        if bucket not in self.sims:
            p = parse_program(self.texts[bucket])
            self.sims[bucket] = Simulator(p, trial.runtime_sizes(p), moved=self.moved)
        return self.sims[bucket]

    def outcome(self, requests: list[list[trial.Request]], bucket: int) -> tuple[list[int], Tensor]:
        """Sampled tokens of a prefill and a decode step, and the logits behind them (float64)."""
        caches: dict[str, list[Tensor]] = {}
        tokens: list[int] = []
        logits: list[Tensor] = []
        for step in range(2):
            sim = self.sim(bucket if step == 0 else max(len(g) for g in requests))
            p = sim.p
            seeds = {n: 1000 + n if n % 2 else 0 for g in requests for n, _, _ in g}
            results, env = sim.run(trial.batch(p, requests, seeds if step else None), self.weights, caches)
            found = trial.outcomes(p, requests, results[0])
            tokens += [token for _, token in found]
            logits.append(
                sim.meaning.assemble(env["head"], p.types["head"])[[k for k, _ in found]][:, : p.logical["v"]]
            )
            fed = iter(token for _, token in found)
            new = [[[next(fed) for _ in picks][-1] for picks in mine] for mine in trial.sampled(p, requests)]
            requests = [
                [(n, [token], first + len(ids)) for (n, ids, first), token in zip(mine, last)]
                for mine, last in zip(requests, new)
            ]
        return tokens, torch.cat(logits)


@functools.cache
def one_rank(model: str, groups: int, tokens: int, idle: bool) -> tuple[list[int], Tensor]:
    requests = [[r for g in work(groups, tokens, idle) for r in g]]
    size = max(sum(len(ids) for _, ids, _ in requests[0]), 1)
    n = len(requests[0])
    buckets = sorted({(size, n), (n, n)})
    return Bench(compiled(model, "", "", buckets, load_costs("cpu"))).outcome(requests, size)


def run(t: Trial, prices: CostModel | None = None) -> int:
    """Runs one layout on every bucket edge; AssertionError where tokens differ or logits do not agree. Returns the cases.
    `prices`: others than those of the trial's seed."""
    plan = make_plan(parse_mesh(t.mesh), t.axes)
    ranks, groups = plan.mesh.ranks, plan.mesh.size(plan.home)
    edges = [(1, False), (ranks - 1, False), (ranks, False), (ranks + 1, False), (12, False)]
    if groups > 1:
        edges.append((ranks, True))
    rng = random.Random(t.seed)
    costs = prices or (load_costs("cpu") if t.seed % 3 == 0 else random_costs(rng))
    tokens = sorted({e for e, _ in edges} | {1, 2})
    bench = Bench(compiled(t.model, t.mesh, t.axes, [(b, min(b, 2)) for b in tokens], costs))
    for n, idle in edges:
        got, logits = bench.outcome(work(groups, n, idle), n)
        want, exact = one_rank(t.model, groups, n, idle)
        at = f"{n} tokens a group{', the last group idle' if idle else ''}"
        assert got == want, f"{t}, {at}: tokens {got}, on one rank {want}"
        assert torch.allclose(logits, exact, rtol=1e-9, atol=1e-9), f"{t}, {at}: other logits"
    return len(edges)


def fault(t: Trial) -> str:
    """What is wrong on a layout; "" if nothing."""
    try:
        run(t)
    except Exception as e:  # a refusal or a crash is a fault too: the layout is legal
        return f"{type(e).__name__}: {e}"
    return ""


def attempt(t: Trial) -> tuple[int, str]:
    """Cases that held, and the fault: of the layout with the fewest axes mapped and the plainest prices that has one."""
    try:
        return run(t), ""
    except Exception:
        less: Trial | None = t
        while less:
            t = less
            parts = t.axes.split(",")
            plainer = [replace(t, axes=",".join(parts[:i] + parts[i + 1 :])) for i in range(len(parts))]
            less = next((q for q in (*plainer, replace(t, seed=0)) if q != t and fault(q)), None)
        return 0, f"{t}: {fault(t)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compiler.layouts", description=__doc__)
    parser.add_argument("--sample", type=int, default=None, help="how many layouts (default: all)")
    parser.add_argument("--seed", type=int, default=11, help="of the sample and the prices (default 11)")
    add_jobs(parser)
    add_part(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = part_of(trials(args.sample, args.seed), args.part)
    cases = failures = 0
    for held, what in each(attempt, chosen, args.jobs, "layouts", chunk=CHUNK):
        cases += held
        if what:
            failures += 1
            print(f"fault: {what}", file=sys.stderr, flush=True)
    print(f"{cases} cases: {len(chosen)} layouts of models x bucket edges, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
