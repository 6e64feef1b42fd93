"""route and experts on CPU against their meaning, written here a row and an expert at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.support import DTYPES, poisoned
from tokenspeed import kernels as K
from tokenspeed.ir.ops import REFERENCES

E, F, H, KEEP = 6, 24, 40, 2


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(E, 2 * F, H) / H**0.5).to(dtype), (torch.randn(E, H, F) / F**0.5).to(dtype)


def a_row(x: Tensor, ids: list[int], shares: list[float], w13: Tensor, w2: Tensor) -> Tensor:
    """float64 [H]."""
    out = torch.zeros(H, dtype=torch.float64)
    for e, share in zip(ids, shares):
        if 0 <= e < E:
            gate, up = (w13[e].double() @ x.double()).chunk(2)
            out += share * (w2[e].double() @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["cpu.experts", "reference.experts"])
def test_experts_of_this_rank_add_their_share(isa: str, dtype: torch.dtype, kernel: str) -> None:
    spec, (w13, w2) = K.get(kernel), weights(dtype)
    packed = spec.pack(w13), spec.pack(w2)
    for rows in (1, 3, 17):
        x = torch.randn(rows, H).to(dtype)
        ids = torch.stack([torch.randperm(2 * E)[:KEEP] for _ in range(rows)]).int()  # half of them are others'
        ids[0] = torch.tensor([-1, 4])
        shares = torch.rand(rows, KEEP)
        for offset in (0, E):
            out = poisoned(rows, H, dtype=dtype)
            spec.fn(x, ids, shares, *packed, offset=offset, out=out)
            local = (ids - offset).tolist()
            want = torch.stack([a_row(*row, w13, w2) for row in zip(x, local, shares.tolist())])
            bound = 1e-5 if dtype == torch.float32 else 0.03
            assert torch.allclose(out.double(), want, rtol=bound, atol=bound * float(want.abs().max()))
            alone = [r for r in range(rows) if not any(0 <= e < E for e in local[r])]
            assert torch.equal(out[alone], torch.zeros(len(alone), H, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype) -> None:
    spec = K.get("cpu.experts")
    packed = [spec.pack(w) for w in weights(dtype)]
    x, shares = torch.randn(40, H).to(dtype), torch.rand(40, KEEP)
    ids = torch.stack([torch.randperm(E)[:KEEP] for _ in range(40)]).int()
    x[7] = float("nan")  # a hole
    whole = torch.empty_like(x)
    spec.fn(x, ids, shares, *packed, out=whole)
    for rows in ([0], [39], [3, 8, 21], list(range(10, 30))):
        out = torch.empty(len(rows), H, dtype=dtype)
        spec.fn(x[rows], ids[rows], shares[rows], *packed, out=out)
        assert torch.equal(out, whole[rows])
    assert whole[7].isnan().all() and whole.isnan().sum() == H


def test_weights_are_packed_once_and_shapes_are_checked() -> None:
    spec, (w13, w2) = K.get("cpu.experts"), weights(torch.float32)
    assert spec.pack(w13) is spec.pack(w13)
    x, ids, shares = torch.randn(2, H), torch.zeros(2, KEEP, dtype=torch.int32), torch.rand(2, KEEP)
    with pytest.raises(ValueError, match="experts: these arguments do not fit"):
        spec.fn(x, ids, shares, spec.pack(w2), spec.pack(w13), out=torch.empty_like(x))
    with pytest.raises(ValueError, match="experts: these arguments do not fit"):
        spec.fn(x, ids, shares[:1], spec.pack(w13), spec.pack(w2), out=torch.empty_like(x))


@pytest.mark.parametrize("normalise", [True, False])
def test_route_takes_the_most_probable_lowest_id_first(normalise: bool) -> None:
    z = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0], [float("nan")] * 4])
    ids, shares = REFERENCES["route"](z, k=2, normalise=normalise)
    assert ids.tolist()[:2] == [[1, 3], [0, 1]] and ids.dtype == torch.int32
    exact = z[:2].softmax(-1).gather(1, ids[:2].long())
    assert torch.allclose(shares[:2], exact / exact.sum(1, keepdim=True) if normalise else exact)
    assert shares[2].isnan().all()


def test_route_adds_the_bias_to_the_choice_alone_and_keeps_to_the_best_groups() -> None:
    """Sigmoid scores in four groups of three, two of them kept by the sum of their best two, written out for one row."""
    z = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, 0.5, 3.0, -3.0, -3.0, 1.0, 1.0, 1.0]])
    bias = torch.tensor([0.9, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    how = {"k": 3, "score": "sigmoid", "groups": 4, "top_groups": 2, "group_best": 2}
    ids, shares = REFERENCES["route"](z, bias, **how, normalise=False, scale=2.5)
    s = z.sigmoid()  # groups count 2.57, 1.50, 1.00, 1.46: the first two are kept, expert 6 is not
    assert ids.tolist() == [[0, 2, 3]] and torch.equal(shares, s[:, [0, 2, 3]] * 2.5)
    _, shares = REFERENCES["route"](z, bias, **how, normalise=True, scale=2.5)
    assert torch.allclose(shares.sum(), torch.tensor(2.5))
    ids, _ = REFERENCES["route"](torch.zeros(1, 12), torch.zeros(12), **how, normalise=True)
    assert ids.tolist() == [[0, 1, 2]], "the lowest group and the lowest id first among equals"
    _, shares = REFERENCES["route"](torch.full((1, 12), -200.0), None, **how, normalise=True)
    assert torch.equal(shares, torch.zeros(1, 3))


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_route_equals_the_routers_of_transformers(family: str) -> None:
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "n_routed_experts": 24, "num_experts_per_tok": 5, "n_group": 6, "topk_group": 3,
             "routed_scaling_factor": 1.7}  # fmt: skip
    g = torch.Generator().manual_seed(4)
    x, w, bias = (torch.randn(shape, generator=g) for shape in ((64, 16), (24, 16), (24,)))
    if family == "v2":
        router = DeepseekV2TopkRouter(DeepseekV2Config(**sizes, topk_method="group_limited_greedy"))
        how = {"score": "softmax", "normalise": False, "group_best": 1}
    else:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**sizes, norm_topk_prob=True))
        router.e_score_correction_bias.copy_(bias)
        how = {"score": "sigmoid", "normalise": True, "group_best": 2}
    router.weight.data.copy_(w)
    with torch.no_grad():
        _, want, at = router(x)
    ids, shares = REFERENCES["route"](
        x @ w.t(), bias if family == "v3" else None, k=5, groups=6, top_groups=3, scale=1.7, **how
    )
    assert torch.equal(ids.long().sort(1).values, at.sort(1).values)
    assert torch.allclose(shares.gather(1, ids.argsort(1)), want.gather(1, at.argsort(1)), rtol=1e-5)
