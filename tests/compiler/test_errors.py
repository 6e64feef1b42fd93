"""What an author is told: the code, the line, both types, the reason, and fixes that work when they are followed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.sim import Steps, random_weights, tiny
from tokenspeed.compiler.api import compile_model
from tokenspeed.ir.errors import PlacementError, PlanError, SpecError, TokenSpeedError
from tokenspeed.ir.spec import parse_sides, parse_spec
from tokenspeed.runtime.compiling import load_class

SOURCE = """
from typing import Annotated

from torch import Tensor

from tokenspeed.models.llama import CausalLM, Layer
from tokenspeed.models.nn import *


class Under(Module):
    def __init__(self):
        {init}

    def forward(self, {arguments}){result}:
        {body}


class Block(Layer):
    def __init__(self, c, rope, window):
        super().__init__(c, rope, window)
        self.under = Under()

    def forward(self, x: Stream, b: Batch) -> Stream:
        x = x + self.attn(self.norm1(x), b)
        return x + self.under(self.norm2(x))


class Model(CausalLM):
    layer = Block
"""

ROWS, PART = 'x: Annotated[Tensor, "t* h"]', ' -> Annotated[Tensor, "t* h +mlp"]'
GOOD = {
    "init": 'self.up, self.down = Linear("h -> f@mlp"), Linear("f@mlp -> h")',
    "arguments": ROWS,
    "result": PART,
    "body": "return self.down(silu(self.up(x)))",
}


class Author:
    """Writes a model file with one leaf of the test's making, and compiles it for two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def compile(self, mesh: str = "tp=2", axes: str = "", **parts: str) -> Any:
        self.count += 1
        self.file = self.folder / f"model{self.count}.py"
        self.text = SOURCE.format(**GOOD | parts)
        self.file.write_text(self.text)
        return compile_model(load_class(self.file, "Model"), tiny(), mesh=mesh, axes=axes, buckets=[4])

    def refused(self, kind: type[TokenSpeedError], code: str, **parts: str) -> str:
        with pytest.raises(kind) as fault:
            self.compile(**parts)
        assert fault.value.code == code, fault.value.message
        return fault.value.message

    def line(self, fragment: str) -> str:
        """FILE:LINE of the first line of the model that holds `fragment`; the leaf comes first in the file."""
        number = next(i for i, line in enumerate(self.text.splitlines(), 1) if fragment in line)
        return f"{self.file}:{number}"


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path)


def test_the_model_of_these_tests_is_right(author: Author) -> None:
    assert author.compile().result.programs


# ---- a complete value and a pending sum ------------------------------------------------------------------------------


def test_a_complete_value_added_to_a_pending_sum(author: Author) -> None:
    body = "return x + self.down(silu(self.up(x)))"
    said = author.refused(PlacementError, "P012", body=body)
    here = author.line(body)
    assert said.startswith(f"{here}  in Under.forward: add\n")
    assert re.search(r"value x +: f32\[t, h\] +an argument\n", said)
    assert re.search(rf"value \d +: f32\[t, h\] \+mlp +from linear, {re.escape(here)}\n", said)
    assert "a complete value added to a sum pending over mlp is counted once a rank" in said
    assert re.search(
        r"e.g. 2 ranks of mlp: %x = 5; %\d = \d+ and -?\d+, a pending sum: add gives .*, which sum to \d+; one rank has \d+",
        said,
    )
    assert 'fix 1: reduce the pending operand first: place(x, "t* h")' in said
    assert "fix 2: return the pending value and do this in the calling composite" in said


def test_its_first_fix_is_right(author: Author) -> None:
    """It compiles, and two ranks give the tokens of one."""
    parts = {"body": 'return x + place(self.down(silu(self.up(x))), "t* h")', "result": ' -> Annotated[Tensor, "t* h"]'}

    def tokens(mesh: str) -> list[int]:
        result = author.compile(mesh, **parts).result
        steps = Steps(result, random_weights(result))
        return [steps.step(4, [[(0, prompt, 0)]])[0][0] for prompt in ([3], [5, 6], [7, 8, 9], [900, 2, 2, 1])]

    assert tokens("tp=2") == tokens("")
    assert len(set(tokens(""))) > 2


def test_what_place_makes_whole_is_not_what_it_was_made_of(author: Author) -> None:
    """The placed value is another one: the pending sum itself is as pending as before."""
    body = 'y = self.down(silu(self.up(x))); place(y, "t* h"); return y'
    assert author.compile(body=body).result.programs
    said = author.refused(PlacementError, "P020", body=body, result=' -> Annotated[Tensor, "t* h"]')
    assert "over mlp the value is a pending sum, declared whole" in said


def test_a_complete_bias_inside_a_pending_sum(author: Author) -> None:
    init = 'self.up, self.down = Linear("h -> f@mlp"), Linear("f@mlp -> h", bias=True)'
    said = author.refused(PlacementError, "P012", init=init)
    assert author.line("self.down(silu") in said
    assert "@down.bias:0" in said and "f32[h]" in said and "f32[t, f@mlp]" in said
    assert "a complete bias inside a sum pending over mlp is counted once a rank" in said
    fix = re.search(r'bias="[^"]*"', said)
    assert fix
    assert author.compile(init=init.replace("bias=True", fix[0])).result.programs


def test_a_nonlinear_op_on_a_pending_sum(author: Author) -> None:
    body = "return silu(self.down(silu(self.up(x))))"
    said = author.refused(PlacementError, "P011", body=body)
    assert said.startswith(f"{author.line(body)}  in Under.forward: silu\n") and "f32[t, h] +mlp" in said
    assert "e.g. 2 ranks of mlp: " in said and "silu gives" in said
    whole = ' -> Annotated[Tensor, "t* h"]'
    assert author.compile(body='return silu(place(self.down(silu(self.up(x))), "t* h"))', result=whole).result.programs


# ---- an axis used twice ----------------------------------------------------------------------------------------------


def test_an_axis_used_twice_in_a_signature(author: Author) -> None:
    bad = 'x: Annotated[Tensor, "t@mlp h@mlp"]'
    said = author.refused(SpecError, "P002", arguments=bad)
    assert said.startswith(
        f"{author.line('def forward')}: argument 'x' of Under.forward: axis 'mlp' is used twice in \"t@mlp h@mlp\"\n"
    )
    assert "first     : t@mlp\n" in said and "second    : h@mlp\n" in said
    assert "a rank has one coordinate on an axis" in said
    assert 'fix 1: write "h" for "h@mlp"' in said and 'fix 2: write "t" for "t@mlp"' in said


def test_an_axis_used_twice_in_a_weight(author: Author) -> None:
    """Also on one rank, where the axis is empty and nothing would go wrong."""
    init = 'self.up, self.down = Linear("h@mlp -> f@mlp"), Linear("f@mlp -> h")'
    for mesh in ("tp=2", ""):
        said = author.refused(SpecError, "P002", init=init, mesh=mesh)
        assert said.startswith(f"{author.line(init)}: axis 'mlp' is used twice in \"h@mlp -> f@mlp\"\n")
        assert "first     : h@mlp" in said and "second    : f@mlp" in said and 'write "f" for "f@mlp"' in said


def test_an_axis_that_splits_rows_and_a_weight(author: Author) -> None:
    arguments, result = 'x: Annotated[Tensor, "t@mlp h"]', ' -> Annotated[Tensor, "t@mlp h"]'
    said = author.refused(PlacementError, "P010", arguments=arguments, result=result)
    assert said.startswith(f"{author.line('self.down(silu')}  in Under.forward: linear\n")
    assert "f32[t@mlp, h]" in said and "f32[f@mlp, h]" in said
    assert "mlp shards the rows of the operand and f of the weight" in said and "fix 1: " in said


@pytest.mark.parametrize(
    ("text", "first", "second", "fixes"),
    [
        ("t@tp h@tp", "t@tp", "h@tp", ['write "h" for "h@tp"', 'write "t" for "t@tp"']),
        ("t@dp h@tp +tp", "h@tp", "+tp", ['leave "+tp" out', 'write "h" for "h@tp"']),
        ("t@dp h +tp +tp,mlp", "+tp", "+tp,mlp", ['write "+mlp" for "+tp,mlp"', 'leave "+tp" out']),
        ("h@(a,b) f@b", "h@(a,b)", "f@b", ['write "f" for "f@b"', 'write "h@a" for "h@(a,b)"']),
        ("n@tp kv@tp:kv", "n@tp", "kv@tp:kv", ['write "kv" for "kv@tp:kv"', 'write "n" for "n@tp"']),
    ],
)
def test_both_uses_and_both_fixes(text: str, first: str, second: str, fixes: list[str]) -> None:
    with pytest.raises(SpecError) as fault:
        parse_spec(text)
    said = fault.value.message
    assert fault.value.code == "P002" and f"first     : {first}\n" in said and f"second    : {second}\n" in said
    for number, fix in enumerate(fixes, 1):
        assert f"fix {number}: {fix}" in said
        old = re.search(r'for "([^"]+)"|leave "([^"]+)" out', fix)
        new = re.search(r'write "([^"]+)"', fix)
        assert old
        words = text.split()
        words[len(words) - 1 - words[::-1].index(old[1] or old[2])] = new[1] if new else ""
        parse_spec(" ".join(words))  # the fixed annotation is one


def test_the_outputs_of_one_weight_may_share_an_axis() -> None:
    assert len(parse_sides("h -> n@tp*d | kv@tp:kv*d | kv@tp:kv*d")[1]) == 3


# ---- a wrong declared output -----------------------------------------------------------------------------------------


def test_a_pending_result_declared_complete(author: Author) -> None:
    said = author.refused(PlacementError, "P020", result=' -> Annotated[Tensor, "t* h"]')
    assert said.startswith(f"{author.line('def forward')}  Under.forward: declared output and derived output differ\n")
    assert re.search(r'declared : f32\[t, h\] +from "t\* h"\n', said)
    assert re.search(rf"derived  : f32\[t, h\] \+mlp +from linear, {re.escape(author.line('self.down(silu'))}\n", said)
    assert "over mlp the value is a pending sum, declared whole" in said
    assert "e.g. 2 ranks of mlp hold " in said
    assert 'fix 1: declare "t* h +mlp" (0 bytes)\n' in said
    assert said.endswith(
        'fix 2: return place(value, "t* h") (one all-reduce over mlp, 2(n-1)/n x h x 4 B a row and rank)'
    )


@pytest.mark.parametrize(
    ("parts", "reason", "fix"),
    [
        ({"body": "return x"}, "over mlp the value is whole, declared a pending sum", "t* h"),
        ({"body": "return silu(self.up(x))"}, "the dims differ: ['t', 'h'] and ['t', 'f']", "t* f@mlp"),
        (
            {
                "init": 'self.up = Linear("h -> f@mlp")',
                "body": "return self.up(x)",
                "result": ' -> Annotated[Tensor, "t* f"]',
            },
            "over mlp the value is sharded on f, declared whole",
            "t* f@mlp",
        ),
        (
            {
                "init": 'self.qkv = Linear("h -> n@tp*d | kv@tp:kv*d")',
                "arguments": 'x: Annotated[Tensor, "t@dp h"]',
                "body": "return self.qkv(x)[1]",
                "result": ' -> Annotated[Tensor, "t@dp kv@tp d"]',
            },
            "declared sharded on kv",
            "t@dp kv@tp:kv d",
        ),
    ],
    ids=["complete", "other dims", "sharded", "sub-axis"],
)
def test_other_wrong_results(author: Author, parts: dict[str, str], reason: str, fix: str) -> None:
    said = author.refused(PlacementError, "P020", **parts)
    assert reason in said and f'fix 1: declare "{fix}" (0 bytes)' in said
    assert "declared : f32[" in said and "derived  : f32[" in said
    try:
        author.compile(**parts | {"result": f' -> Annotated[Tensor, "{fix}"]'})
    except TokenSpeedError as later:  # the leaf passes, and then the block cannot add what it returns
        assert later.code != "P020"


# ---- plans and grammar -----------------------------------------------------------------------------------------------


def test_two_axes_on_one_mesh_axis(author: Author) -> None:
    parts = {
        "init": 'self.up, self.down = Linear("h -> f@mlp"), Linear("f@mlp -> h@tp")',
        "result": ' -> Annotated[Tensor, "t* h@tp +mlp"]',
    }
    said = author.refused(PlanError, "P031", **parts)
    assert said.startswith(f"{author.line('def forward')}  Under: h@tp and +mlp share mesh axis 'tp'")
    assert "fix 1: give the two axes different mesh axes (--axes)" in said and "fix 2: " in said


def test_an_unknown_axis(author: Author) -> None:
    said = author.refused(PlanError, "P034", init=GOOD["init"].replace("mlp", "mpl"), result=PART.replace("mlp", "mpl"))
    assert said.startswith(f"{author.line('def forward')}: Under.forward: axis 'mpl' is not an axis of this plan")
    assert "'mlp'" in said


def test_an_unknown_dim(author: Author) -> None:
    said = author.refused(PlanError, "P034", init='self.up, self.down = Linear("h -> g@mlp"), Linear("g@mlp -> h")')
    assert "dim 'g' has no extent" in said and "'f'" in said


@pytest.mark.parametrize(
    ("parts", "where", "reason"),
    [
        ({"arguments": "x"}, "def forward", "'x' of Under.forward needs a placement"),
        ({"result": ""}, "def forward", "does not say how its result is placed"),
        ({"arguments": 'x: Annotated[Tensor, "t@ h"]'}, "def forward", "cannot read 't@'"),
        ({"init": 'self.up = Linear("h f@mlp")'}, "Linear(", "a linear map is written IN -> OUT"),
        ({"init": 'self.up = Linear("h -> f@@mlp")'}, "Linear(", "cannot read 'f@@mlp'"),
        ({"init": 'self.w = Weight("v h", pad=("f", 64))'}, "Weight(", "pad names 'f'"),
        ({"init": 'self.n = RMSNorm("h@", 1e-5)'}, "RMSNorm(", "cannot read 'h@'"),
        ({"init": 'self.a = PagedAttention("n@tp d", 1.0)'}, "PagedAttention(", "takes three dims"),
    ],
)
def test_an_annotation_that_cannot_be_read_names_its_line(
    author: Author, parts: dict[str, str], where: str, reason: str
) -> None:
    said = author.refused(SpecError, "P001", **parts)
    assert said.startswith(f"{author.line(where)}: ") and reason in said


def test_a_body_does_not_branch_on_a_value(author: Author) -> None:
    said = author.refused(PlacementError, "P006", body="return x if x else self.down(silu(self.up(x)))")
    assert said.startswith(author.line("return x if x")) and "branch" in said
