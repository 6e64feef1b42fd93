"""Real processes: every layout of the embedded model gives the tokens of one rank, 20 prompts in one batch."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import PROMPTS, write_tiny
from tokenspeed import Engine, RequestOutput, SamplingParams, compiler
from tokenspeed.runtime.compiling import compile_options, write_artifact
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError


@functools.cache
def tokens(mesh: str) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of the 20 prompts, submitted together."""
    with Engine(
        model="smollm2", dtype="float32", mesh=mesh, max_num_seqs=32, max_num_batched_tokens=128, memory_fraction=0.05,
        buckets=[1, 8, 16, 32, 64, 128], core="process" if mesh else "inproc",
    ) as engine:  # fmt: skip
        results = engine.generate(
            prompt=PROMPTS, sampling_params=SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        )
    return tuple(tuple(r.token_ids) for r in results)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4", "dp=2,tp=2"])
def test_layout_gives_the_tokens_of_one_rank(mesh: str) -> None:
    assert tokens(mesh) == tokens("")


PLANS = [("dp=2,tp=2", "mlp=dp*tp,vp=dp*tp"), ("dp=2", "mlp=dp,vp=dp"), ("a=2,b=2", "tp=a*b,mlp=b"), ("tp=2", "mlp=1")]


def sampled(model: Path, mesh: str, axes: str) -> list[list[int]]:
    return [r.token_ids for r in generated(model, mesh, axes)]


def generated(model: Path, mesh: str, axes: str) -> list[RequestOutput]:
    return of_engine(
        model=str(model), mesh=mesh, axes=axes, max_num_seqs=4, max_num_batched_tokens=32, num_pages=64, buckets=[1, 4, 8, 32],
        core="process" if mesh else "inproc",
    )  # fmt: skip


def of_engine(**options: Any) -> list[RequestOutput]:
    """What four prompts give by greedy, temperature and filtered sampling (the gumbel and the full variant), then with every
    other parameter."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 1003) for _ in range(n)] for n in (3, 17, 9, 30)]
    common = {"max_tokens": 8, "ignore_eos": True, "detokenize": False}
    kinds = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=5, **common),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=5, repetition_penalty=1.2, **common),
        SamplingParams(
            temperature=1.3, top_p=0.8, min_p=0.001, seed=6, presence_penalty=0.7, frequency_penalty=0.4,
            logit_bias={5: 3.0, 700: -4.0, 1002: 3.0}, logprobs=7, **common,
        ),
        SamplingParams(temperature=0, allowed_token_ids=[4, 501, 502, 1000, 1001], logprobs=20, min_tokens=8, **common),
    ]  # fmt: skip
    with Engine(**options) as engine:
        return [r for kind in kinds for r in engine.generate(input_ids=prompts, sampling_params=kind)]


@pytest.mark.parametrize(
    ("kind", "axes", "over"),
    [
        ("qwen3_moe", "ep=dp,etp=tp", {"mlp_only_layers": [0], "num_hidden_layers": 3}),
        ("deepseek_v32", "ep=dp*tp,se=1", {}),
    ],
)
def test_experts_on_every_rank_give_the_tokens_of_one(tmp_path: Path, kind: str, axes: str, over: dict) -> None:
    model = write_tiny(tmp_path / "model", kind, **over)
    one = sampled(model, "", "")
    assert sampled(model, "dp=2,tp=2", axes) == one


def test_rows_that_travel_to_their_experts_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Exchanged over home groups and inside them, in every bucket that allows it: prices are made so."""
    model = write_tiny(tmp_path / "model", "deepseek_v3")
    table = json.loads((Path(compiler.__file__).parent / "calibration" / "cpu.json").read_text())
    cheap = {
        "id": "exchange",
        "alpha_us": {"8": 1.0},
        "beta_gbs": 1e-3,
        "collectives": {"all_to_all": {"8": {"alpha_us": 0.1, "gbs": 10}}},
    }
    (tmp_path / "prices.json").write_text(json.dumps(table | cheap))
    common: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "buckets": [1, 4, 8, 32]}
    options = EngineConfig(model=str(model), mesh="dp=2,tp=2", axes="ep=dp*tp,se=1", **common)
    done = compile_options(options, calibration=str(tmp_path / "prices.json"))
    rows = [r for e in done.result.explain.values() for r in e["redistributions"] if r["op"] == "exchange"]
    assert {tuple(r["axes"]) for r in rows} == {("dp",), ("dp", "tp")}
    artifact = write_artifact(options, done, str(tmp_path / "artifact"))
    got = of_engine(model=str(artifact), core="process", num_pages=64)
    assert [r.token_ids for r in got] == sampled(model, "", "")


def test_heterogeneous_plans_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    one = generated(model, "", "")
    kinds = [tuple(tuple(r.token_ids) for r in one[i : i + 4]) for i in range(0, len(one), 4)]
    assert len(set(kinds)) == len(kinds) == 5, "the kinds of sampling must differ"
    assert {t for r in one[16:] for t in r.token_ids} <= {4, 501, 502, 1000, 1001}
    for mesh, axes in PLANS:
        for r, want in zip(generated(model, mesh, axes), one, strict=True):
            assert r.token_ids == want.token_ids, (mesh, axes)
            for e, f in zip(r.logprobs or [], want.logprobs or [], strict=True):
                assert e.top_ids == f.top_ids, (mesh, axes)
                assert [e.logprob, *e.top_logprobs] == pytest.approx([f.logprob, *f.top_logprobs], abs=1e-4)
    assert [len(e.top_ids) for e in one[12].logprobs or []] == [7] * 8


@pytest.mark.parametrize(
    ("kind", "mesh", "axes"),
    [("llama", "cp=2", ""), ("deepseek_v32", "cp=2", ""), ("gpt_oss", "cp=2,tp=2", "ep=cp,etp=tp")],
)
def test_a_request_on_the_pages_of_two_ranks_gives_the_tokens_of_one(
    tmp_path: Path, kind: str, mesh: str, axes: str
) -> None:
    model = write_tiny(tmp_path / "model", kind)
    assert sampled(model, mesh, axes) == sampled(model, "", "")


def test_pages_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", "llama")
    with (
        pytest.raises(StartupError, match="num_pages=63 does not divide over the 2 ranks"),
        Engine(model=str(model), mesh="cp=2", num_pages=63, buckets=[1, 8], max_num_seqs=2, max_num_batched_tokens=8),
    ):
        pass
