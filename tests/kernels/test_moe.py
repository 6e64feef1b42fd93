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
