"""Registration and selection: every level of precedence, every refusal with its reason, and that neither depends on the
order of registration."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed import _cpu
from tokenspeed import kernels as K
from tokenspeed.kernels import registry as registry_module
from tokenspeed.kernels.select import candidates
from tokenspeed.kernels.spec import KernelSpec, source_hash_of
from tokenspeed.kernels.target import target_of

VARIABLE = "TOKENSPEED_KERNEL_OVERRIDE_GEMM_LINEAR"
BF16_Q4 = {"x": "bfloat16", "w": "q4_1", "out": "bfloat16"}


def fake(name: str, **more: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "op": "linear", "solution": "cpu", "fn": lambda x, w, bias=None, *, out: None,
        "signatures": ({"x": frozenset({"float32"}), "w": frozenset({"float32", "q4_1"})},),
        "priority": K.Priority.PERFORMANT,
    }  # fmt: skip
    return KernelSpec(name=name, **{**fields, **more})


@pytest.fixture
def three() -> K.Registry:
    registry = K.Registry()
    registry.register(
        fake("slow", priority=K.Priority.PORTABLE, solution="torch", tags=frozenset({"portability", "determinism"}))
    )
    registry.register(fake("b.fast", tags=frozenset({"throughput"})))
    registry.register(fake("a.fast", tags=frozenset({"latency"})))
    registry.register(
        fake("special", priority=K.Priority.SPECIALIZED, traits={"tokens": K.at_most(8), "k": K.multiple_of(32)})
    )
    registry.register(fake("gpu", priority=K.Priority.PLUGIN, capability=K.Capability("cuda", min_arch=90)))
    return registry


def pick(registry: K.Registry, **more: Any) -> str:
    signature = more.pop("signature", {"x": "float32", "w": "float32"})
    return K.select("linear", signature=signature, registry=registry, **more).name


def test_priority_then_name(three: K.Registry) -> None:
    assert pick(three) == "a.fast"
    assert pick(three, traits={"tokens": 4, "k": 64}) == "special"
    assert pick(three, traits={"tokens": (1, 8), "k": 64}) == "special"
    assert pick(three, traits={"tokens": (1, 9), "k": 64}) == "a.fast"
    assert pick(three, device="cuda:90") == "gpu"
    assert pick(three, device="cuda:80") == "a.fast"


def test_objectives(three: K.Registry) -> None:
    assert pick(three, objective="throughput") == "b.fast"
    assert pick(three, objective="latency") == "a.fast"
    assert pick(three, objective="portability") == "slow"
    assert pick(three, objective="determinism") == "slow"
    assert pick(three, objective="debug") == "slow"


def test_precedence(three: K.Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.json"
    entry = {
        "op": "linear",
        "signature": {"x": "float32"},
        "traits": {"tokens": [1, 16]},
        "kernel": "b.fast",
        "us": 3.0,
    }
    worse = {**entry, "kernel": "slow", "us": 9.0}
    absent = {**entry, "kernel": "gone", "us": 1.0}
    tuned.write_text(json.dumps({"device": "test", "entries": [worse, absent, entry]}))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"overrides": {"gemm/linear": "slow"}}))
    facts = {"tokens": 4}
    assert pick(three, traits=facts) == "a.fast"  # heuristic
    monkeypatch.setenv("TOKENSPEED_KERNEL_TUNED", str(tuned))
    assert pick(three, traits=facts) == "b.fast"  # tuned table, through the environment
    assert pick(three, traits={"tokens": 17}) == "a.fast"  # outside the entry's range
    assert pick(three) == "a.fast"  # the fact is not stated
    monkeypatch.delenv("TOKENSPEED_KERNEL_TUNED")
    with K.selection(tuned=tuned):
        assert pick(three, traits=facts) == "b.fast"
        with K.selection(config=config):
            assert pick(three, traits=facts) == "slow"  # config file
            monkeypatch.setenv(VARIABLE, "b.fast")
            assert pick(three, traits=facts) == "b.fast"  # environment
            with K.selection(overrides={"gemm/linear": "a.fast"}):
                assert pick(three, traits=facts) == "a.fast"  # context
                assert pick(three, traits=facts, override="torch") == "slow"  # argument, by solution
                top = K.explain("linear", signature={}, registry=three, override="slow")[0]
                assert (top.spec.name, top.chosen_by) == ("slow", "argument")
            assert pick(three, traits=facts) == "b.fast"
    monkeypatch.delenv(VARIABLE)
    assert pick(three, traits=facts) == "a.fast"
    monkeypatch.setenv("TOKENSPEED_KERNEL_CONFIG", str(config))
    assert pick(three) == "slow"


def test_overrides_are_checked(three: K.Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        K.SelectionError, match=r"(?s)argument asks for kernel 'special'.*needs tokens <= 8, the request has 9"
    ):
        pick(three, override="special", traits={"tokens": 9, "k": 32})
    with pytest.raises(K.SelectionError, match="needs k a multiple of 32, which the request does not state"):
        pick(three, override="special", traits={"tokens": 1})
    with pytest.raises(K.SelectionError, match=r"x takes float32, not bfloat16"):
        pick(three, override="slow", signature={"x": "bfloat16"})
    with pytest.raises(K.SelectionError, match="runs on cuda, not on cpu"):
        pick(three, override="gpu")
    with pytest.raises(K.SelectionError, match="needs sm_90 or later, the device is sm_80"):
        pick(three, override="gpu", device="cuda:80")
    monkeypatch.setenv(VARIABLE, "fastest")
    with pytest.raises(
        K.SelectionError, match=rf"(?s)environment {VARIABLE} asks for kernel 'fastest'.*registered: a.fast"
    ):
        pick(three)


def test_nothing_eligible_lists_every_reason(three: K.Registry) -> None:
    with pytest.raises(K.SelectionError) as caught:
        pick(three, signature={"x": "float32", "w": "q8_0"})
    for name in ("slow", "a.fast", "b.fast", "special", "gpu"):
        assert f"{name}: " in str(caught.value)
    assert "w takes float32|q4_1, not q8_0" in str(caught.value)
    with pytest.raises(K.SelectionError, match="no kernel is registered"):
        K.select("scale", signature={}, registry=three)


def test_explain_orders_and_names_misses(three: K.Registry) -> None:
    candidates = K.explain("linear", signature={"x": "float32"}, registry=three)
    assert [c.spec.name for c in candidates][:3] == ["a.fast", "b.fast", "slow"]
    assert candidates[0].chosen_by == "heuristic"
    assert {c.spec.name for c in candidates if not c.eligible} == {"special", "gpu"}
    assert all(c.reasons for c in candidates if not c.eligible)
    reversed_registry = K.Registry()
    for spec in reversed(list(three)):
        reversed_registry.register(spec)
    again = K.explain("linear", signature={"x": "float32"}, registry=reversed_registry)
    assert [c.spec.name for c in again] == [c.spec.name for c in candidates]


def test_bad_requests_are_refused(three: K.Registry) -> None:
    with pytest.raises(KeyError, match="unknown op 'matmul'"):
        K.select("matmul", signature={}, registry=three)
    with pytest.raises(ValueError, match="has no role 'y'"):
        pick(three, signature={"y": "float32"})
    with pytest.raises(KeyError, match="unknown format 'int3'"):
        pick(three, signature={"x": "int3"})
    with pytest.raises(ValueError, match="unknown objective"):
        pick(three, objective="speed")
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        pick(three, device="tpu")


def test_bad_specs_are_refused(three: K.Registry) -> None:
    with pytest.raises(ValueError, match="'slow' is already registered"):
        three.register(fake("slow"))
    with pytest.raises(ValueError, match="has no role 'q'"):
        fake("x", signatures=({"q": frozenset({"float32"})},))
    with pytest.raises(KeyError, match="unknown format"):
        fake("x", signatures=({"x": frozenset({"fp9"})},))
    with pytest.raises(ValueError, match="at least one signature"):
        fake("x", signatures=())
    with pytest.raises(ValueError, match="unknown tags"):
        fake("x", tags=frozenset({"quick"}))
    with pytest.raises(ValueError, match="outside the bands"):
        fake("x", priority=99)
    with pytest.raises(ValueError, match="word without spaces"):
        fake("a b")
    with pytest.raises(TypeError, match="must be callable"):
        fake("x", fn=3)
    with pytest.raises(KeyError, match=r"no kernel is called 'nope'; registered: a\.fast"):
        three.get("nope")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"overrides": 3}', '{"overrides": {"gemm/linera": "x"}}', '{"overrides": {"gemm/linear": 1}}'],
)
def test_broken_config_files_are_named(three: K.Registry, tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"kernel config file .*config\.json"), K.selection(config=path):
        pick(three)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        '{"device": "d", "entries": [{}]}',
        '{"device": "d", "entries": [{"op": "linear", "kernel": "x", "us": "f"}]}',
    ],
)
def test_broken_tuned_tables_are_named(three: K.Registry, tmp_path: Path, content: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tuned table .*tuned\.json"), K.selection(tuned=path):
        pick(three)


def test_references_serve_every_op_and_dequantise() -> None:
    from tests.kernels.support import quantised

    weight, values = quantised("q4_1", 5, 64)
    spec = K.select("linear", signature=BF16_Q4, objective="debug")
    assert (spec.name, spec.solution) == ("reference.linear", "reference")
    x, out = torch.randn(2, 64), torch.empty(2, 5)
    spec.fn(x, spec.pack(weight), None, out=out)
    torch.testing.assert_close(out, x @ values.t())
    pair = torch.empty(2, 64), torch.empty(2, 64)
    K.get("reference.add_rms_norm").fn(x, x, torch.ones(64), eps=1e-5, out=pair)
    assert torch.equal(pair[0], x + x)
    with pytest.raises(KeyError, match="unknown op"):
        K.register_references({"no_such_op": lambda x: x}, K.Registry())


def test_the_choice_for_the_cpu() -> None:
    assert K.select("linear", signature=BF16_Q4).name == "cpu.linear_int8"
    assert K.select("linear", signature={**BF16_Q4, "x": "float32", "out": "float32"}).name == "cpu.linear"
    assert K.select("linear", signature={"x": "bfloat16", "w": "bfloat16", "out": "float32"}).name == "cpu.linear"
    for op in ("lookup", "rms_norm", "rope", "attend", "append", "sample", "argmax", "silu_mul", "add"):
        assert K.select(op, signature={}).solution == "cpu"
    assert K.select("all_reduce", signature={}).solution == "gloo"
    assert K.select("all_reduce", signature={}, device="cuda:90").solution == "nccl"
    assert target_of("cpu").features >= {"cpu_extension", "portable"}


@pytest.mark.parametrize(
    ("tokens", "n", "k", "solution"),
    [(16, 3584, 8192, "triton"), (256, 3584, 8192, "reference"), (160, 28672, 8192, "reference"), (1024, 28672, 8192, "gluon"),
     (1024, 14336, 4096, "gluon"), (512, 14336, 4096, "reference"), (1024, 28668, 8192, "reference")],
)  # fmt: skip
def test_gate_and_up_of_many_rows_are_one_product_where_their_tiles_fill_the_device(
    tokens: int, n: int, k: int, solution: str
) -> None:
    """By tiles, by the table of an H200, and by rows that TMA can fetch. The reference stands for the separate kernels."""
    formats = dict.fromkeys(("x", "w", "out"), "bfloat16")
    facts = {"tokens": tokens, "n": n, "k": k}
    assert K.select("linear_silu_mul", signature=formats, traits=facts, device="cuda:90").solution == solution


def test_a_condition_on_a_product_of_facts() -> None:
    registry = K.Registry()
    registry.register(fake("large", traits={"tokens*n": K.at_least(100)}))

    def reasons(**facts: Any) -> tuple[str, ...]:
        return candidates("linear", signature={}, traits=facts, device="cpu", registry=registry)[0].reasons

    assert not reasons(tokens=10, n=10) and not reasons(tokens=(10, 20), n=10)
    assert "has 90" in reasons(tokens=9, n=10)[0] and "has (90, 200)" in reasons(tokens=(9, 20), n=10)[0]
    assert "does not state" in reasons(tokens=9)[0] and "does not state" in reasons(tokens=9, n="many")[0]


def test_every_override_variable_is_distinct() -> None:
    from tokenspeed.kernels.ops import OPS

    assert len({op.override_variable for op in OPS.values()}) == len(OPS) == len({op.key for op in OPS.values()})
    assert OPS["linear"].override_variable == VARIABLE


def test_source_hashes_are_stable_and_follow_the_source() -> None:
    spec = K.get("cpu.linear")
    assert len(spec.source_hash) == 16 and spec.source_hash == source_hash_of(spec.fn, _cpu.source_hash().encode())
    assert spec.source_hash != K.get("cpu.rope").source_hash
    assert source_hash_of(spec.fn, b"other binary") != spec.source_hash


def test_plugins_register_and_broken_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: EntryPoint) -> Any:
        if self.name == "broken":
            raise RuntimeError("missing symbol")
        return lambda registry: registry.register(fake("acme.linear", priority=K.Priority.PLUGIN, solution="acme"))

    monkeypatch.setattr(EntryPoint, "load", load)
    found = [EntryPoint("acme", "acme.kernels:register", registry_module.PLUGIN_GROUP)]
    monkeypatch.setattr(
        registry_module, "entry_points", lambda group: found if group == registry_module.PLUGIN_GROUP else []
    )
    registry = registry_module.default_registry.__wrapped__()
    assert pick(registry) == "acme.linear"
    found.append(EntryPoint("broken", "broken:register", registry_module.PLUGIN_GROUP))
    with pytest.raises(ImportError, match=r"plugin 'broken' \(broken:register\).*missing symbol"):
        registry_module.default_registry.__wrapped__()
