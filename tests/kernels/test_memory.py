"""Huge-page memory: zeroed, aligned, freed with its last piece, and never shared between pieces."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.memory import HUGE_PAGE, Arena, zeros


@pytest.mark.parametrize("shape", [(0,), (3, 5), (1 << 20, 3), (HUGE_PAGE,)])
def test_zeros(shape: tuple[int, ...]) -> None:
    x = zeros(*shape, dtype=torch.bfloat16)
    assert x.shape == shape and x.dtype == torch.bfloat16 and x.is_contiguous() and not x.any()
    if x.numel() * 2 >= HUGE_PAGE:
        assert x.data_ptr() % HUGE_PAGE == 0


def test_arena_pieces_are_disjoint_and_aligned() -> None:
    arena = Arena(region=4 * HUGE_PAGE)
    sizes = [1, 63, 64, 65, 100_000, 3 * HUGE_PAGE, HUGE_PAGE, 2 * HUGE_PAGE, 7]
    pieces = [arena.take(size) for size in sizes]
    for i, piece in enumerate(pieces):
        assert piece.numel() == sizes[i] and piece.data_ptr() % 64 == 0
        piece.fill_(i + 1)
    for i, piece in enumerate(pieces):
        assert bool((piece == i + 1).all())


def test_pieces_share_a_region_and_keep_it_alive() -> None:
    arena = Arena(region=2 * HUGE_PAGE)
    first, second = arena.take(100), arena.take(HUGE_PAGE)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    second.fill_(1)
    del first, arena
    junk = [torch.full((2 * HUGE_PAGE,), 9, dtype=torch.uint8) for _ in range(4)]
    assert bool((second == 1).all()) and len(junk) == 4
