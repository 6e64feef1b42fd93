"""explain: the table, why, diff, JSON and the page, of artifacts on disk; golden texts and totals of real sizes."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.golden import FOLDER, check
from tests.compiler.sim import tiny
from tests.compiler.test_compile_time import config
from tokenspeed.cli import main
from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.page import shown
from tokenspeed.models import find_family

COLUMNS = {
    "value", "edge", "from", "to", "op", "fused", "axes", "bytes_per_token", "time_us", "rule", "reason", "runner_up",
    "gap_us",
}  # fmt: skip


def write(folder: Path, **options: Any) -> str:
    c = tiny(num_hidden_layers=3)
    family = find_family(c["architectures"][0])
    defaults: dict[str, Any] = {"mesh": "tp=2", "buckets": [1, 256], "max_rows": 4, "calibration": "h200"}
    return str(compile_model(family, c, **defaults | options).write(folder))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("artifacts")
    return [
        write(root / "a", certificate=True), write(root / "b", tactics=["layers.*.attn=reduce_scatter"]),
        write(root / "dp", mesh="dp=2,tp=2", axes="mlp=dp*tp"),
    ]  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["explain", *words]) == status
    out, err = capsys.readouterr()
    return out if status == 0 else err


def test_the_table(artifacts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without the arenas, which depend on the kernels that are registered."""
    text = said(capsys, artifacts[0], "--variant", "gumbel") + said(capsys, artifacts[2], "--bucket", "256")
    lines = [", ".join(w for w in line.split(", ") if not w.startswith("arena ")) for line in text.splitlines()]
    check("explain.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("value", ["%layers.1.add", "layers.1.mlp", "%layers.0.attn/3", "embed'"])
def test_why(artifacts: list[str], capsys: pytest.CaptureFixture[str], value: str) -> None:
    """The chain runs to a port or an argument, and each step names its op, its rule and its operands' states."""
    name = value.strip("%").replace("/", ".").replace("'", "_")
    text = said(capsys, artifacts[0], "why", value, "--bucket", "1")
    check(f"why.{name}.txt", text)
    assert text.splitlines()[-1].strip() in ("a port of the program", "an argument of the leaf")


def test_why_names_the_values_there_are(artifacts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, artifacts[0], "why", "%layers.1", "--bucket", "1", status=1)
    assert "has no value %layers.1; e.g. " in text and "%layers.1.attn" in text


def test_diff(artifacts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "diff", artifacts[0], artifacts[0]).startswith("no difference")
    text = said(capsys, "diff", *artifacts[:2])
    assert "gumbel.t256: " in text and "step " in text
    assert any("layers.*.attn -> layers.*.add: " in line and "reduce_scatter" in line for line in text.splitlines())
    other = said(capsys, "diff", artifacts[0], artifacts[2])
    assert "  + " in other and "dp" in other


def test_json(artifacts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    info = json.loads(said(capsys, artifacts[0], "--json", "--bucket", "256"))
    assert {p["variant"] for p in info["programs"]} == {"gumbel", "full"} and info["certificate"]["bodies"]
    for p in info["programs"]:
        assert p["arena_bytes"] > 0 and p["collectives"] == sum(r["time_us"] >= 11.5 for r in p["redistributions"])
        for r in p["redistributions"]:
            assert set(r) == COLUMNS
            assert r["gap_us"] is None or r["gap_us"] >= 0


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag not in ("meta", "path"):
            self.open.append(tag)
        assert not any(k in ("src", "href") for k, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "path", "p") or (self.open and self.open[-1] == tag):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(
    artifacts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "1.html", tmp_path / "2.html"]
    for f in files:
        said(capsys, artifacts[2], "--html", str(f))
    text = files[0].read_text()
    assert text == files[1].read_text() and "http" not in text
    page = _Balanced()
    page.feed(text)
    assert page.open in ([], ["p"]) and page.seen["svg"] == page.seen["table"] == 4 and page.seen["path"] > 50
    assert "more layers like it" in text and "runner-up" in text
    assert "cannot write" in said(capsys, artifacts[2], "--html", str(tmp_path / "no" / "x.html"), status=1)


def test_the_page_draws_a_run_of_equal_layers_once() -> None:
    c = tiny(num_hidden_layers=6)
    p = compile_model(find_family(c["architectures"][0]), c, mesh="tp=2", buckets=[8]).result.programs["gumbel", 8]
    drawn = shown(p)
    assert len(drawn) < len(p.nodes) and sum(more for _, more in drawn) == 3  # of 1 to 4; the ends differ
    calls = [n.attrs["path"] for n, _ in drawn if n.op == "call"]
    assert {"layers.0.attn", "layers.1.attn", "layers.5.attn"} <= set(calls) and "layers.3.attn" not in calls


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["diff", "x"], "write `explain DIR`"),
        (["DIR", "--bucket", "7"], "its buckets are [1, 256]"),
        (["DIR", "why", "a", "b"], "write `explain DIR`"),
    ],
)
def test_what_cannot_be_shown(
    artifacts: list[str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in said(capsys, *(artifacts[0] if w == "DIR" else w for w in words), status=1)


REAL = [
    ("llama-3.3-70b", "tp=8", ""),
    ("llama-3.1-8b", "dp=2,tp=2", "mlp=dp*tp,vp=tp"),
    ("llama-3.1-8b", "tp=4", ""),
    ("gpt-oss-120b", "tp=8", ""),
    ("glm-4.5-air", "dp=4,tp=2", "ep=dp*tp"),
    ("minimax-m2", "dp=4,tp=2", "ep=dp*tp"),
    ("deepseek-v3", "dp=4,tp=2", "ep=dp*tp,mlp=tp,vp=tp,se=1"),
    ("deepseek-v3.2", "dp=4,tp=2", "ep=dp*tp,mlp=tp,vp=tp,se=1"),
    ("kimi-k2.5", "dp=4,tp=2", "ep=dp*tp,mlp=tp,vp=tp,se=1"),
    ("gemma-3-1b", "tp=4", ""),
    ("qwen3-next-80b-a3b", "dp=4,tp=2", "ep=dp*tp,mlp=tp,vp=tp,se=1"),
    ("qwen3.5-27b", "tp=8", ""),
]


@pytest.mark.parametrize(("model", "mesh", "axes"), REAL)
def test_totals_of_real_sizes_do_not_rise(model: str, mesh: str, axes: str) -> None:
    """Collectives, bytes on the wire a token, and memory; less is fine, and then the golden file is written anew."""
    c = config(model)
    done = compile_model(
        find_family(c["architectures"][0]), c, mesh=mesh, axes=axes, dtype="bfloat16", cache_dtype="bfloat16",
        buckets=[1, 64, 8192], calibration="h200",
    )  # fmt: skip
    totals = {
        name: {k: round(e[k]) for k in ("collectives", "bytes_per_token", "arena_bytes")} for name, e in done.result.explain.items()
    }  # fmt: skip
    totals["weights"] = {"bytes": done.result.weight_bytes}
    name = f"totals.{model}.{mesh.replace(',', '-')}.json"
    text = json.dumps(totals, indent=1, sort_keys=True) + "\n"
    if not (FOLDER / name).exists():
        check(name, text)
    stored = json.loads((FOLDER / name).read_text())
    assert stored.keys() == totals.keys()
    for program, values in totals.items():
        for k, v in values.items():
            assert v <= stored[program][k], f"{program}: {k} rose from {stored[program][k]} to {v}"
            assert v > 0.5 * stored[program][k], f"{program}: {k} fell to {v}: write {name} anew"
