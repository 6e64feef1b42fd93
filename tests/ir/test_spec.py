"""The annotation grammar: what parses, how it prints, and what is refused with which code."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.ir.errors import PlanError, SpecError
from tokenspeed.ir.mesh import Mesh, make_plan, parse_mesh, parse_plan
from tokenspeed.ir.spec import parse_sides, parse_spec


@pytest.mark.parametrize(
    "text",
    [
        "t* h +?", "t@dp n@tp d", "t* h +ep? +etp", "t@dp h +tp", "s* argmax:vp", "t@dp -> slots@dp", "t@(dp,tp) h",
        "s@dp l -> slots@dp", "t@dp n@tp d lse:cp",
    ],
)  # fmt: skip
def test_a_spec_prints_as_it_was_written(text: str) -> None:
    assert str(parse_spec(text)) == text
    assert parse_spec(str(parse_spec(text))) == parse_spec(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("t@tp f@tp", "P002"), ("t@tp h +tp", "P002"), ("n*d@tp", "P003"), ("t h@", "P001"), ("+tp t", "P001"), ("n@(tp,tp)", "P002"),
        ("kv:kv", "P001"), ("t*@dp", "P001"), ("t@dp -> a b", "P001"), ("t h +a max:b", "P002"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_refused_and_quoted(text: str, code: str) -> None:
    with pytest.raises(SpecError) as e:
        parse_spec(text)
    assert e.value.code == code
    assert text in str(e.value)


def test_a_linear_map_flattens_products_into_dims() -> None:
    inp, segments = parse_sides("h -> n@tp*d | kv@tp:kv*d")
    assert [str(d) for d in inp] == ["h"]
    assert [[str(d) for d in s] for s in segments] == [["n@tp", "d"], ["kv@tp:kv", "d"]]


def test_logical_axes_map_by_default_and_by_name() -> None:
    plan = make_plan(parse_mesh("dp=2,tp=4"), "ep=dp*tp")
    assert plan.axes("mlp") == ("tp",)
    assert plan.axes("vp") == ("tp",)
    assert plan.axes("ep") == ("dp", "tp")
    assert plan.axes("cp") == ()
    assert plan.home == ("dp",)


@pytest.mark.parametrize(
    ("mesh", "axes", "code"),
    [
        ("tp=0", "", "P034"), ("tp", "", "P034"), ("tp=2,tp=2", "", "P034"), ("tp=2", "mlp=xx", "P034"), ("a=2", "tp=a*a", "P031"),
        ("tp=2", "mlp=mlp", "P034"),
    ],
)  # fmt: skip
def test_a_wrong_plan_names_the_axis(mesh: str, axes: str, code: str) -> None:
    with pytest.raises(PlanError) as e:
        make_plan(parse_mesh(mesh), axes)
    assert e.value.code == code


@pytest.mark.parametrize(
    ("mesh", "axes", "same", "axes_of_same"),
    [
        ("a=1,b=2", "tp=a*b,mlp=b*a,vp=a", "b=2", "tp=b,mlp=b,vp=1"), ("dp=1,tp=2", "ep=dp*tp", "tp=2", "ep=tp"),
        ("mlp=1,tp=2", "", "tp=2", "mlp=1"), ("etp=1,tp=2", "ep=1", "tp=2", "ep=1,etp=1"), ("a=1", "tp=a", "", ""),
    ],
)  # fmt: skip
def test_an_axis_of_one_rank_vanishes_from_every_product(mesh: str, axes: str, same: str, axes_of_same: str) -> None:
    assert make_plan(parse_mesh(mesh), axes) == make_plan(parse_mesh(same), axes_of_same)


def test_a_plan_with_split_axes_reads_back() -> None:
    plan = make_plan(parse_mesh("dp=2,tp=8"), "vp=dp*tp").split("tp", (2, 4))
    assert parse_plan(plan.describe()) == plan
    assert plan.fold(("dp", "tp.0", "tp.1")) == ("dp", "tp")
    assert plan.fold(("tp.0",)) == ("tp.0",)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_groups_partition_the_ranks(sizes: list[int]) -> None:
    mesh = Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
    for k in range(len(mesh.names)):
        axes = mesh.names[: k + 1]
        groups = mesh.groups(axes)
        assert sorted(r for g in groups for r in g) == list(range(mesh.ranks))
        for g in groups:
            for i, r in enumerate(g):
                assert mesh.index(r, axes) == i
                assert mesh.group(r, axes) == g
