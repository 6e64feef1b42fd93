"""Files of model families: short, decoder layers of a few lines, and no word of groups or collectives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tokenspeed.models
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.ops.comm import Redistribute

FILES = sorted(Path(tokenspeed.models.__file__).parent.glob("*.py"))
FORBIDDEN = {name for name, op in OPS.items() if isinstance(op, Redistribute)} | {
    "distributed",
    "process_group",
    "world_size",
}


def words(tree: ast.AST) -> set[str]:
    """Every name that code uses: variables, attributes, imports, keywords."""
    found: set[str] = set()
    for n in ast.walk(tree):
        match n:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.arg(arg=name):
                found.add(name)
            case ast.alias(name=name):
                found |= set(name.split("."))
            case ast.ImportFrom(module=str(name)):
                found |= set(name.split("."))
            case _:
                pass
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_family_is_short_and_names_no_collective(file: Path) -> None:
    source = file.read_text("utf-8")
    assert len(source.splitlines()) <= 300
    tree = ast.parse(source)
    assert not words(tree) & FORBIDDEN
    for c in (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith(("Layer", "Block"))):
        assert (c.end_lineno or 0) - c.lineno < 30, c.name


def test_a_collective_would_be_seen() -> None:
    assert {"all_reduce", "all_gather", "reduce_scatter", "slice", "keep_first"} <= FORBIDDEN
    for line in (
        "x = b.all_reduce(x)",
        "import torch.distributed as d",
        "y = f(x, process_group=0)",
        "def f(world_size): ...",
    ):
        assert words(ast.parse(line)) & FORBIDDEN, line
