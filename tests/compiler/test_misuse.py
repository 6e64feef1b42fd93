"""Authors who misuse the ops of experts and of index keys: one error each, with a code and the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiler.layouts import config
from tokenspeed.compiler.costs import load_costs
from tokenspeed.compiler.fuzz import compile_source
from tokenspeed.compiler.passes.pipeline import Request, Result, run_passes
from tokenspeed.ir.errors import PlanError, TokenSpeedError
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.models.nn import Config
from tokenspeed.runtime.compiling import load_class

HEAD = """
from typing import Annotated
from torch import Tensor
from tokenspeed.models import deepseek, deepseek_sparse, nn
from tokenspeed.models.nn import Module
"""
INDEX = """
class Indexer(deepseek_sparse.Indexer):
    def __call__(self, x, ql, b):
        q, k = self.rope(self.q_b(ql), self.k_norm(self.k(x)), b.pos, pairs=False)
        {before}
        return {result}

class Attention(deepseek_sparse.Attention):
    def __init__(self, c, rope):
        super().__init__(c, rope)
        self.indexer = Indexer(c, rope)
        self.indexer.best = nn.LatentIndex("di", {k}, "{dim}")

class Model(deepseek_sparse.CausalLM):
    def attention(self, c):
        return Attention(c, self.rope)
"""
EXPERTS = """
class Routed(Module):
    def __init__(self):
        self.router = nn.Linear("h -> e", dtype="f32")
        self.w13, self.w2 = nn.Experts("e@ep: h -> fe@etp | fe@etp"), nn.Experts("e@ep: fe@etp -> h")

    def forward(self, x: Annotated[Tensor, "t* h"]) -> Annotated[Tensor, "t* h +ep? +etp"]:
        ids, shares = nn.route(self.router(x), nn.Routing({how}))
        return nn.experts(x, {operands}, self.w13, self.w2)

class Model(deepseek.CausalLM):
    def experts(self, c):
        return Routed()
"""


def compiled(folder: Path, source: str) -> Result:
    (folder / "model.py").write_text(HEAD + source)
    plan = make_plan(parse_mesh("dp=2,tp=2"), "ep=dp*tp,etp=1,mlp=tp,se=1,vp=1" if "Routed" in source else "")
    family, c = load_class(folder / "model.py", "Model"), Config(config("DeepseekV32ForCausalLM"))
    return run_passes(Request(family, c, plan, [(2, 2)], "f32", "f32", load_costs("cpu"), variants=("gumbel",)))


INDEXED = {"before": "pass", "result": "self.best(q, self.weights(x), k, b)", "k": 3, "dim": "ik"}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"k": 4}, "P004", "takes k=4 positions, ik=3"), ({"k": 0}, "P004", "from 1 on, not 0"), ({"k": "'3'"}, "P004", "not '3'"),
        ({"dim": "zz"}, "P034", "'zz' that has no extent"), ({"result": "self.weights(x)"}, "P004", "mla takes i32 as operand 8"),
        ({"before": "self.best(q, self.weights(x), k, b)"}, "V11", "is written twice"), ({"result": "nn.silu(b.pos)"}, "P004", ""),
        ({"result": "nn.cat([k, k], 'ik')"}, "P004", "is not the sum"),
    ],
)  # fmt: skip
def test_index_keys(tmp_path: Path, change: dict[str, object], code: str, words: str) -> None:
    with pytest.raises(TokenSpeedError) as caught:
        compiled(tmp_path, INDEX.format(**INDEXED | change))
    said = str(caught.value)
    assert caught.value.code == code and words in said
    assert any(f"{file}.py:" in said for file in ("model", "deepseek")), said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("2", "takes k=2 of 24 experts into k"), ("0", "from 1 on as k, not 0"), ("'3'", "as k, not '3'"),
        ("3, score='tanh'", "not 'tanh'"), ("3, scale=float('inf')", "times inf"), ("3, groups=0", "as groups, not 0"),
        ("3, groups=5", "5 groups of 24"), ("3, groups=4, top_groups=0", "as top_groups, not 0"),
        ("3, groups=4, top_groups=5", "from 5 of 4 groups"), ("3, groups=4, top_groups=2, group_best=0", "as group_best, not 0"),
        ("3, groups=4, top_groups=2, group_best=7", "their best 7"),
    ],
)  # fmt: skip
def test_routing(tmp_path: Path, how: str, words: str) -> None:
    with pytest.raises(TokenSpeedError, match=r"^P004 .*model\.py:\d+  in ") as caught:
        compiled(tmp_path, EXPERTS.format(how=how, operands="ids, shares"))
    assert words in str(caught.value)


def test_ids_and_shares_are_not_each_other(tmp_path: Path) -> None:
    with pytest.raises(TokenSpeedError, match=r"(?s)^P004 .*model\.py:\d+  in .*experts takes i32 as operand 2"):
        compiled(tmp_path, EXPERTS.format(how="3", operands="shares, ids"))


def test_the_models_of_these_tests_are_right(tmp_path: Path) -> None:
    assert compiled(tmp_path, INDEX.format(**INDEXED)).programs
    assert compiled(tmp_path, EXPERTS.format(how="3", operands="ids, shares")).programs


def test_a_boundary_that_no_row_of_a_bucket_can_meet_is_named() -> None:
    """One row a home group cannot be cut over tp, whatever a signature says: also where an add and a norm stand behind it."""
    source = """
from typing import Annotated
from torch import Tensor
from tokenspeed.models.nn import *
from tokenspeed.models.nn.params import export


class Batch(Ports):
    x = Port("t@dp h", "f32")
    last = Port("s@dp -> t@dp")


class Leaf(Module):
    def __init__(self):
        self.up, self.down = Linear("h -> f@tp"), Linear("f@tp -> h")

    def forward(self, x: Annotated[Tensor, "t@dp h"]) -> Annotated[Tensor, "t@dp h +tp"]:
        return self.down(silu(self.up(x)))


class Inner(Module):
    def __init__(self):
        self.leaf = Leaf()

    def forward(self, x: Annotated[Tensor, "t* h +?"]) -> Annotated[Tensor, "t@tp h +?"]:
        return x + self.leaf(x)


class Root(Module):
    dims = staticmethod(lambda c: {"h": 6, "f": 10})

    def __init__(self, c):
        self.inner, self.norm, self.leaf = Inner(), RMSNorm("h", 1e-5), Leaf()

    def forward(self, b: Batch) -> Annotated[Tensor, "s@dp h"]:
        x = b.x + self.inner(b.x)
        x = x + self.leaf(self.norm(x))
        export("stream", x, "t@dp h")
        return select_rows(x, b.last)
"""
    with pytest.raises(
        TokenSpeedError, match=r"P030 no legal placement(.|\n)*wanted : t@tp h \+\?(.|\n)*too few to be cut"
    ):
        compile_source(source, "dp=2,tp=2", "", (1, 1), load_costs("cpu"))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("cp=tp", r"cp and tp both lie on mesh axis 'tp', and mlp=cp\*tp \(its default\) would use it"),
        ("ep=tp*tp", r"tp lies twice on mesh axis 'tp', and ep=tp\*tp would use it"),
    ],
)
def test_a_product_that_uses_a_mesh_axis_twice_names_what_lies_on_it(axes: str, words: str) -> None:
    with pytest.raises(PlanError, match=f"(?s)^P031 .*{words} twice.*fix 1: give .* mesh axes of their own"):
        make_plan(parse_mesh("tp=2"), axes)
