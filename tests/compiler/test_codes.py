"""Every P code: a model, plan or request that it is raised for, its words, and the same thing mended, for which it is not. (V codes:
test_rules.py.)"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compiler import test_rules
from tests.compiler.golden import check
from tests.compiler.layouts import config
from tests.compiler.sim import compile_tiny, tiny
from tests.compiler.test_errors import ROWS, Author
from tokenspeed.compiler.costs import load_costs
from tokenspeed.ir import codes
from tokenspeed.ir.errors import PlacementError, TokenSpeedError
from tokenspeed.models.nn import Linear, silu

ROOT = Path(__file__).parents[2]
WHOLE = ' -> Annotated[Tensor, "t* h"]'
UP = 'self.up, self.down = Linear("h -> f@mlp"), Linear("f@mlp -> h")'
Case = tuple[dict[str, str], dict[str, str]]  # parts of the model: wrong, mended

#: models of one leaf
LEAVES: dict[str, Case] = {
    "P001": ({"arguments": 'x: Annotated[Tensor, "t@ h"]'}, {}),
    "P002": ({"arguments": 'x: Annotated[Tensor, "t@mlp h@mlp"]'}, {}),
    "P003": ({"init": 'self.up, self.down = Linear("h -> n*d@mlp"), Linear("n*d@mlp -> h")'},
             {"init": 'self.up, self.down = Linear("h -> n@mlp*d"), Linear("n@mlp*d -> h")'}),
    "P004": ({"body": "return self.down(silu(self.up(select_rows(x, x))))"}, {}),
    "P005": ({"body": 'return self.down(silu(self.up(x + "1")))'}, {"body": "return self.down(silu(self.up(x + x)))"}),
    "P006": ({"body": "return x if x else self.down(silu(self.up(x)))"}, {}),
    "P010": ({"arguments": 'x: Annotated[Tensor, "t@mlp h"]', "result": ' -> Annotated[Tensor, "t@mlp h"]'}, {}),
    "P011": ({"body": "return silu(self.down(silu(self.up(x))))"},
             {"body": 'return silu(place(self.down(silu(self.up(x))), "t* h"))', "result": WHOLE}),
    "P012": ({"body": "return x + self.down(silu(self.up(x)))"},
             {"body": 'return x + place(self.down(silu(self.up(x))), "t* h")', "result": WHOLE}),
    "P013": ({"init": 'self.up = Linear("h -> f@mlp")', "arguments": 'x: Annotated[Tensor, "t* h max:mlp"]', "body": "return silu(x)"}, {}),
    "P014": ({"init": 'self.a, self.b = Linear("h -> f@(mlp,ep)"), Linear("h -> f@(ep,mlp)"); self.o = Linear("f@(mlp,ep) -> h")',
              "body": "return self.o(self.a(x) + self.b(x))", "result": ' -> Annotated[Tensor, "t* h +mlp,ep"]'},
             {"init": 'self.a, self.b = Linear("h -> f@(mlp,ep)"), Linear("h -> f@(mlp,ep)"); self.o = Linear("f@(mlp,ep) -> h")',
              "body": "return self.o(self.a(x) + self.b(x))", "result": ' -> Annotated[Tensor, "t* h +mlp,ep"]'}),
    "P015": ({"init": f'{UP}; self.n = RMSNorm("f@mlp", 1e-5)', "body": "return self.down(self.n(self.up(x)))"},
             {"init": f'{UP}; self.n = RMSNorm("h", 1e-5)', "body": "return self.down(self.up(self.n(x)))"}),
    "P016": ({"init": f'{UP}; self.s = Linear("h -> f@mlp")', "body": "return self.down(self.s(self.down(self.up(x))))"},
             {"init": f'{UP}; self.s = Linear("h -> f@mlp")', "body": 'return self.down(self.s(place(self.down(self.up(x)), "t* h")))'}),
    "P020": ({"result": WHOLE}, {}),
    "P031": ({"init": 'self.up, self.down = Linear("h -> f@mlp"), Linear("f@mlp -> h@tp")',
              "result": ' -> Annotated[Tensor, "t* h@tp +mlp"]'}, {}),
    "P034": ({"init": UP.replace("mlp", "mpl"), "result": ' -> Annotated[Tensor, "t* h +mpl"]'}, {}),
}  # fmt: skip


def leaf(code: str, wrong: bool) -> Callable[[Author], Any]:
    return lambda author: author.compile(**LEAVES[code][0 if wrong else 1])


def llama(mesh: str = "tp=2", axes: str = "", **request: Any) -> Callable[[Author], Any]:
    over = request.pop("over", {})
    return lambda author: compile_tiny(
        tiny(**over), mesh, axes, request.pop("buckets", [(4, 4)]), variants=("gumbel",), **request
    )


PORT = """
from typing import Annotated
from torch import Tensor
from tokenspeed.models.llama import CausalLM
from tokenspeed.models.nn import *

class Ports_(Batch):
    slot = Port("t{at} -> slots@dp")

class Model(CausalLM):
    def forward(self, b: Ports_) -> Annotated[Tensor, "s@dp"]:
        return super().forward(b)
"""


def port(at: str) -> Callable[[Author], Any]:
    """A model whose slots are not, or are, those of a home group's own rows."""

    def run(author: Author) -> Any:
        from tokenspeed.compiler.api import compile_model
        from tokenspeed.runtime.compiling import load_class

        file = author.folder / f"port{len(at)}.py"
        file.write_text(PORT.format(at=at))
        return compile_model(load_class(file, "Model"), tiny(), mesh="dp=2", buckets=[4])

    return run


def experts(count: int) -> Callable[[Author], Any]:
    given = config("GptOssForCausalLM") | {"num_experts": count}
    return lambda author: compile_tiny(given, "tp=2", "ep=tp,etp=1", [(4, 4)], variants=("gumbel",))


def api(**options: Any) -> Callable[[Author], Any]:
    from tokenspeed.compiler.api import compile_model
    from tokenspeed.models import find_family

    return lambda author: compile_model(
        find_family("LlamaForCausalLM"), tiny(), **{"mesh": "tp=2", "buckets": [4]} | options
    )


#: code -> what raises it, the same mended
CASES: dict[str, tuple[Callable[[Author], Any], Callable[[Author], Any]]] = {
    **{code: (leaf(code, True), leaf(code, False)) for code in LEAVES},
    "P030": (port(""), port("@dp")),
    "P032": (experts(23), experts(24)),
    "P033": (llama("a=4,b=3", "tp=a*b", over={"num_attention_heads": 12, "num_key_value_heads": 6}),
             llama("a=2,b=6", "tp=a*b", over={"num_attention_heads": 12, "num_key_value_heads": 6})),
    "P035": (lambda _: load_costs("no-such-table"), lambda _: load_costs("cpu")),
    "P036": (api(buckets=[4, 2]), api(buckets=[2, 4])),
    "P037": (api(tactics=["layers.9.attn=all_reduce"]), api(tactics=["layers.1.attn=all_reduce"])),
    "P038": (api(tactics=["layers.0.attn=all_gather"]), api(tactics=["layers.0.attn=all_reduce"])),
    "P039": (api(memory_limit=1000), api(memory_limit=10**9)),
}  # fmt: skip


@pytest.mark.parametrize("code", [c for c in codes.CODES if c[0] == "P"])
def test_the_code_is_raised_and_goes_away(code: str, tmp_path: Path) -> None:
    author = Author(tmp_path)
    wrong, mended = CASES[code]
    with pytest.raises(TokenSpeedError) as fault:
        wrong(author)
    assert fault.value.code == code, fault.value
    mended(author)


def test_their_words() -> None:
    """Reviewed texts of every P code."""
    import tempfile

    said = []
    with tempfile.TemporaryDirectory() as folder:
        for code in (c for c in codes.CODES if c[0] == "P"):
            with pytest.raises(TokenSpeedError) as fault:
                CASES[code][0](Author(Path(folder)))
            said.append(re.sub(re.escape(folder), "MODEL", str(fault.value)).replace(f"{ROOT}/", ""))
    check("codes.txt", "\n\n".join(said).replace("model1.py", "model.py") + "\n")


def test_the_table_lists_what_the_sources_raise_and_is_the_page() -> None:
    found = {
        code
        for file in (ROOT / "tokenspeed").rglob("*.py")
        if file.name != "codes.py"
        for code in re.findall(r'"(P\d{3}|V\d{1,2})"', file.read_text())
    }
    assert found == set(codes.CODES)
    assert {c for c in codes.CODES if c[0] == "V"} == set(test_rules.CASES)
    assert (ROOT / "docs" / "codes.md").read_text() == codes.markdown()


@pytest.mark.parametrize(
    ("parts", "numbers"),
    [
        (LEAVES["P012"][0], "add gives"),
        (LEAVES["P011"][0], "silu gives"),
        (LEAVES["P015"][0], "rms_norm gives"),
        (LEAVES["P016"][0], "linear gives"),
    ],
)
def test_numbers_that_two_ranks_would_compute(parts: dict[str, str], numbers: str, tmp_path: Path) -> None:
    said = Author(tmp_path)
    with pytest.raises(PlacementError) as fault:
        said.compile(**parts)
    line = next(x for x in fault.value.message.splitlines() if x.startswith("  e.g. 2 ranks of mlp: "))
    assert numbers in line
    got, want = re.search(r"(?:which sum to|together) (.*); one rank has (.*)$", line).groups()  # type: ignore[union-attr]
    assert got != want
    assert "B a row and rank" in fault.value.message or "0 bytes" in fault.value.message


def test_an_op_outside_a_trace_and_what_cannot_be_added() -> None:
    with pytest.raises(PlacementError, match="P005 this op was called outside a trace"):
        silu(Linear("h -> f"))
    assert ROWS.startswith("x: ")
