"""One program, or one part of an artifact, that breaks each rule of the verifier, and its words; the unbroken one passes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compiler.golden import check
from tests.compiler.sim import compile_tiny, tiny
from tests.ir.test_verifier import untyped
from tokenspeed.compiler.memory import Buffer, plan_memory, verify_memory
from tokenspeed.compiler.passes import certify
from tokenspeed.compiler.passes.bind import Binder
from tokenspeed.compiler.passes.capture import verify_kernels
from tokenspeed.compiler.passes.pipeline import Result, verify_round_trip
from tokenspeed.compiler.trial import random_weights
from tokenspeed.compiler.weightmap import verify_weights
from tokenspeed.ir.agreement import agreement, verify_ranks
from tokenspeed.ir.errors import VerifyError
from tokenspeed.ir.text import parse_program
from tokenspeed.ir.verifier import verify


@functools.cache
def compiled(mesh: str = "tp=2", axes: str = "") -> tuple[Result, Binder]:
    binder = Binder()
    return compile_tiny(tiny(), mesh, axes, [(4, 4), (8, 4)], variants=("gumbel",), binder=binder), binder


def text(mesh: str = "tp=2", axes: str = "") -> str:
    return untyped(compiled(mesh, axes)[0].texts["gumbel", 4])


def edited(*edits: tuple[str, str], mesh: str = "tp=2", axes: str = "") -> str:
    out = text(mesh, axes)
    for old, new in edits:
        assert old in out, old
        out = out.replace(old, new)
    return out


def run(program: str) -> None:
    verify(parse_program(program))


def ranks(change: Callable[[str], str]) -> None:
    """Rank 1 of dp runs another program."""
    source = text("dp=2,tp=2", "vp=dp*tp")
    verify_ranks([parse_program(source if r < 2 else change(source)) for r in range(4)])


def swapped(source: str) -> str:
    """Two collectives that do not need each other, in the other order."""
    lines = source.splitlines()
    i = next(i for i, x in enumerate(lines) if " = all_gather %params " in x)
    j = next(i for i, x in enumerate(lines) if x.startswith("  %layers.0.norm1 ="))
    lines.insert(j, lines.pop(i))
    return "\n".join(lines) + "\n"


def twice(line: str) -> tuple[str, str]:
    found = next(x for x in text().splitlines() if x.strip().startswith(line))
    return found + "\n", found + "\n" + found + "\n"


def one_kernel(change: Callable[[str, str], tuple[str, str]]) -> dict[str, str]:
    kernels = dict(compiled()[1].kernels)
    key = next(k for k in kernels if k.startswith("linear|"))
    name = kernels.pop(key)
    new, kernel = change(key, name)
    return kernels | {new: kernel}


def wrong_answer() -> None:
    """A certificate's comparison of a program with that of other weights."""
    p, q = (parse_program(compiled(mesh)[0].texts["gumbel", 8]) for mesh in ("tp=2", ""))
    weights = [random_weights(compiled(mesh)[0].weights) for mesh in ("tp=2", "")]
    weights[0]["norm"] = weights[0]["norm:0"] = torch.ones(32) * 3
    work = certify._work(p, 1)
    certify._compare(p, *(certify._steps(x, w, {}, work) for x, w in zip((p, q), weights)), work)


EMBED = "%embed' = all_reduce %embed {axes=('tp',)}"

CASES: dict[str, Callable[[], Any]] = {
    "V1": lambda: run(edited(("%layers.0.norm1 = rms_norm %embed'", "%layers.0.norm1 = rms_norm %embed"))),
    "V2": lambda: run(edited(("return %sampler.gumbel'", "return %sampler.gumbel"))),
    "V3": lambda: run(edited(("call @MLP(%layers.0.norm2)", "call @MLP(%layers.0.attn)"))),
    "V4": lambda: run(edited(("weight @w: f32[v@tp, h]", "weight @w: f32[v@tp, h@tp]"))),
    "V5": lambda: run(edited(("f=48", "f=47"))),
    "V6": lambda: run(edited(("f32[slots, kv@tp, d]", "f32[slots, kv, d]"), ("f32[kv@tp, d, h]", "f32[kv, d, h]"))),
    "V7": lambda: ranks(swapped),
    "V8": lambda: ranks(lambda s: s.replace("bucket(t=4, s=4)", "bucket(t=8, s=4)")),
    "V9": lambda: run(edited((EMBED, EMBED.replace("('tp',)", "()")))),
    "V10": lambda: run(edited((EMBED, EMBED + "\n  %spare = all_reduce %embed {axes=('tp',)}"))),
    "V11": lambda: run(edited(twice("append "))),
    "V12": lambda: verify_kernels(one_kernel(lambda key, name: (key, "compiled.lazily")), "cpu"),
    "V13": lambda: verify_memory([Buffer(64, 0, 2), Buffer(64, 1, 3)], [0, 0], 128),
    "V14": lambda: verify_weights(replace(compiled()[0].weights, runs={"n": ((0, 0, 1),)})),
    "V15": lambda: verify_kernels(one_kernel(lambda key, name: (key.replace("x=float32", "x=int32"), name)), "cpu"),
    "V16": lambda: verify_round_trip(compiled()[0].texts["gumbel", 4].replace("= rms_norm ", "= rms_norm  ")),
    "V17": wrong_answer,
}  # fmt: skip


def test_the_unbroken_ones_pass() -> None:
    for mesh, axes in (("tp=2", ""), ("dp=2,tp=2", "vp=dp*tp")):
        run(text(mesh, axes))
        verify_round_trip(compiled(mesh, axes)[0].texts["gumbel", 4])
    ranks(lambda s: s)
    assert agreement(parse_program(text("dp=2,tp=2", "vp=dp*tp"))) == ("dp",)
    r, binder = compiled()
    verify_kernels(binder.kernels, "cpu", needed=binder.kernels)
    verify_weights(r.weights)
    buffers = [Buffer(64, 0, 2), Buffer(64, 1, 3)]
    verify_memory(buffers, *plan_memory(buffers))


@pytest.mark.parametrize("code", CASES)
def test_the_broken_one_is_refused_with_its_code(code: str) -> None:
    with pytest.raises(VerifyError) as e:
        CASES[code]()
    assert e.value.code == code, str(e.value)
    assert len(e.value.message.split()) >= 6, "the message says what and where"


def test_their_words() -> None:
    """The first line of each message; machine-made numbers out."""
    lines = []
    for case in CASES.values():
        try:
            case()
        except VerifyError as e:
            lines.append(f"{e.code:<4} {re.sub(r'[0-9.]+e[-+][0-9]+', 'X', e.message.splitlines()[0])}")
    assert len(lines) == len(CASES)
    check("rules.txt", "\n".join(lines) + "\n")


def test_a_call_without_a_kernel_is_refused() -> None:  # pytorch#185074
    with pytest.raises(VerifyError, match="V12 no kernel is bound to rms_norm"):
        verify_kernels({}, "cpu", needed=["rms_norm|x=float32|tokens=4"])
