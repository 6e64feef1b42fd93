"""Pages of many caches as rows of bytes, on GPU: what the host tier copies. Invariant: a row is what all caches hold of one
page, cache after cache, so a group of pages is one kernel whatever the number of layers.

A table says where the caches are: i64 [3, C] on the device, of each its address, the bytes of a page in it, and where
those begin in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.arguments import fail
from tokenspeed.kernels.launch import launch, power_of_2

BLOCK = 1024  # words that a program moves at a time
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def move_pages(
    rows, row_words, table, pages, caches, programs,
    BYTES: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """`programs` programs a page and cache, each every so many blocks of words. OUT: to the rows, else from them."""
    program = tl.program_id(0)
    part = program % programs
    cache = (program // programs) % caches
    at = program // (programs * caches)
    page = tl.load(pages + at).to(tl.int64)
    size = tl.load(table + caches + cache)
    words = size // BYTES
    here = (tl.load(table + cache) + page * size).to(tl.pointer_type(rows.dtype.element_ty))
    there = rows + at.to(tl.int64) * row_words + tl.load(table + 2 * caches + cache) // BYTES
    for base in range(part * BLOCK, words, programs * BLOCK):
        word = base + tl.arange(0, BLOCK)
        if OUT:
            tl.store(there + word, tl.load(here + word, mask=word < words), mask=word < words)
        else:
            tl.store(here + word, tl.load(there + word, mask=word < words), mask=word < words)


def page_table(caches: Sequence[Tensor], pages: int) -> tuple[Tensor, int]:
    """(the table of contiguous caches that hold `pages` pages each, bytes of a word that divides all of their pages)."""
    sizes = [cache.nbytes // pages for cache in caches]
    if any(not cache.is_contiguous() or cache.nbytes % pages for cache in caches):
        raise fail("page_table", **{f"cache {i}": cache for i, cache in enumerate(caches)})
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    table = torch.tensor([[cache.data_ptr() for cache in caches], sizes, starts], dtype=torch.int64)
    return table.to(caches[0].device), math.gcd(8, *sizes, *(cache.data_ptr() for cache in caches))


def gather_pages(table: Tensor, word: int, pages: Tensor, *, out: Tensor) -> None:
    """Pages (i32|i64 [P]) of the caches of `table`, whose words have `word` bytes, to the rows of out u8 [P, bytes]."""
    _move(table, word, pages, out, True)


def scatter_pages(table: Tensor, word: int, pages: Tensor, rows: Tensor) -> None:
    """Rows u8 [P, bytes] to pages (i32|i64 [P], all different) of the caches of `table`."""
    _move(table, word, pages, rows, False)


def _move(table: Tensor, word: int, pages: Tensor, rows: Tensor, out: bool) -> None:
    count, caches = pages.shape[0], table.shape[1]
    if rows.dtype != torch.uint8 or rows.shape[:1] != (count,) or not rows.is_contiguous() or word not in WORDS:
        raise fail("move_pages", rows=rows, pages=pages, table=table)
    if count == 0:
        return
    words = rows.view(WORDS[word])
    programs = power_of_2(words.shape[1] // caches // (8 * BLOCK))
    launch(
        move_pages, (count * caches * programs,), words, words.shape[1], table, pages, caches, programs,
        BYTES=word, BLOCK=BLOCK, OUT=out, num_warps=4,
    )  # fmt: skip
