"""What a bucket of decodes is cut into: many contexts fill the rounds of a device's blocks."""

from __future__ import annotations

import pytest

from tokenspeed.kernels.attention import triton as attention

SLOTS = 132


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [(48, 3), (64, 4), (72, 5), (80, 5), (96, 3), (112, 4), (128, 4), (160, 5), (192, 4), (256, 4)],
)
def test_the_last_round_of_many_contexts_is_full(tokens: int, blocks: int) -> None:
    found = attention.tiling_of(tokens, True, 32, 8, 128, False, SLOTS)
    keys, parts, least, warps, stages = attention.HELD[blocks]
    assert found == attention.Tiling(16, keys, parts, least, warps, stages)
    here = attention.fullness(8 * tokens, blocks * SLOTS)
    assert all(here >= attention.fullness(8 * tokens, b * SLOTS) for b in attention.HELD)


def test_other_widths_and_exact_products_keep_their_tiling() -> None:
    assert attention.tiling_of(96, True, 32, 8, 64, False, SLOTS).warps == 2
    assert attention.tiling_of(96, True, 32, 8, 256, False, SLOTS).keys == 32
    assert attention.tiling_of(96, True, 32, 8, 128, True, SLOTS).stages == 1
