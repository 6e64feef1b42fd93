"""QuantWeight: values equal gguf's, and slicing, padding and concatenation commute with dequantisation."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.support import QUANT_FORMATS, quantised
from tokenspeed.kernels import QuantWeight
from tokenspeed.kernels.formats import format_of
from tokenspeed.kernels.packing import pack


@pytest.mark.parametrize("fmt", QUANT_FORMATS)
def test_dequantised_values_are_gguf_s(fmt: str) -> None:
    weight, values = quantised(fmt, 9, 512)
    torch.testing.assert_close(weight.dequantize(), values, rtol=1e-6, atol=1e-7)
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("fmt", QUANT_FORMATS)
def test_slices_pads_and_cat_commute_with_dequantisation(fmt: str) -> None:
    weight, _ = quantised(fmt, 10, 1024)
    values = weight.dequantize()
    assert torch.equal(weight.rows(3, 8).dequantize(), values[3:8])
    assert torch.equal(weight.columns(256, 768).dequantize(), values[:, 256:768])
    padded = weight.pad_rows(13).pad_columns(1280)
    assert padded.shape == (13, 1280)
    assert torch.equal(padded.dequantize()[:10, :1024], values)
    assert not padded.dequantize()[10:].any() and not padded.dequantize()[:, 1024:].any()
    both = QuantWeight.cat([weight.rows(4, 10), weight.rows(0, 4)])
    assert torch.equal(both.dequantize(), torch.cat([values[4:], values[:4]]))


def test_errors_say_what_is_wrong() -> None:
    weight, _ = quantised("q4_1", 4, 96)
    with pytest.raises(ValueError, match="cut a block: q4_1 stores blocks of 32"):
        weight.columns(0, 40)
    with pytest.raises(ValueError, match=r"rows 0\.\.5 of a weight with 4 rows"):
        weight.rows(0, 5)
    with pytest.raises(ValueError, match=r"columns 0\.\.128 of a weight with 96"):
        weight.columns(0, 128)
    with pytest.raises(ValueError, match="cannot pad"):
        weight.pad_rows(3)
    with pytest.raises(ValueError, match="no multiple of"):
        weight.pad_columns(100)
    with pytest.raises(ValueError, match="one format and width"):
        QuantWeight.cat([weight, quantised("q8_0", 4, 96)[0]])
    with pytest.raises(ValueError, match=r"needs uint8 data of shape \(4, 60\)"):
        QuantWeight(torch.zeros(4, 59, dtype=torch.uint8), "q4_1", (4, 96))
    with pytest.raises(ValueError, match="no multiple"):
        QuantWeight(torch.zeros(4, 60, dtype=torch.uint8), "q4_1", (4, 100))
    with pytest.raises(ValueError, match="no quantised weight format"):
        QuantWeight(torch.zeros(4, 60, dtype=torch.uint8), "q3_x", (4, 96))


def test_a_weight_is_packed_once_and_freed_with_its_users() -> None:
    import gc
    import weakref

    weight, _ = quantised("q8_0", 20, 64)
    packed = pack(weight)
    assert pack(weight) is packed
    assert packed.nbytes == 2 * ((2 * format_of("q8_0").block_bytes * 16 + 63) // 64 * 64)
    alive = weakref.ref(packed)
    del weight, packed
    gc.collect()
    assert alive() is None


def test_dense_weights_of_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        pack(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"\[N, K\]"):
        pack(torch.zeros(4))
