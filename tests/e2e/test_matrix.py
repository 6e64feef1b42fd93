"""Tokens do not depend on layout, page size, chunking, prefix hits, overlap or retraction.

By default a pairwise covering set of the factors runs; TOKENSPEED_MATRIX=full runs the whole product and prints its count.
"""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.models import write_tiny
from tokenspeed import Engine, SamplingParams

FACTORS: dict[str, list[Any]] = {
    "layout": [
        ("gqa", ""),
        ("gqa", "tp=2"),
        ("gqa", "tp=4"),
        ("nine", "tp=2"),
        ("gqa", "dp=2"),
        ("gqa", "dp=2,tp=2"),
        ("sparse", ""),
        ("latent", "dp=2,tp=2"),
        ("hybrid", "tp=2"),
        ("windows", "cp=2"),
    ],
    "page": [1, 16],
    "chunk": [1, 7, 64, 0],
    "prefix": ["hit", "cold"],
    "overlap": [0, 1],
    "retract": [False, True],
    "tier": ["device", "host"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "nine": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}),
    "latent": ("deepseek_v3", {}),
    "sparse": ("deepseek_v32", {}),
    "hybrid": ("qwen3_next", {}),
    "windows": ("gpt_oss", {}),
}
OUT = 20
HOST = 0.004  # GiB of host memory: hundreds of pages of 16 tokens


def pairwise(factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """A greedy covering set: every pair of values of every two factors occurs in some case."""
    names = list(factors)
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rng, cases = random.Random(1), []
    while pairs:
        best, gain = None, -1
        for _ in range(60):
            pick = {n: rng.randrange(len(factors[n])) for n in names}
            a, i, b, j = rng.choice(sorted(pairs))
            pick[a], pick[b] = i, j
            covered = sum((x, pick[x], y, pick[y]) in pairs for x, y in itertools.combinations(names, 2))
            if covered > gain:
                best, gain = pick, covered
        assert best is not None
        pairs -= {(x, best[x], y, best[y]) for x, y in itertools.combinations(names, 2)}
        cases.append({n: factors[n][best[n]] for n in names})
    return cases


def cases() -> list[dict[str, Any]]:
    """The cases to run, those of one engine process layout together."""
    if os.environ.get("TOKENSPEED_MATRIX") == "full":
        found = [dict(zip(FACTORS, values)) for values in itertools.product(*FACTORS.values())]
    else:
        found = pairwise(FACTORS)
    return sorted(found, key=lambda c: str(c["layout"]))


def prompts() -> list[list[int]]:
    """Two families that share long prefixes, and singles; lengths around pages and chunks."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 1003) for _ in range(48)]
    tails = [[rng.randrange(3, 1003) for _ in range(n)] for n in (1, 17)]
    singles = [[rng.randrange(3, 1003) for _ in range(n)] for n in (1, 16, 33)]
    return [shared + t for t in tails] + singles + [shared, shared]


def generate(model: Path, mesh: str, case: dict[str, Any]) -> list[list[int]]:
    """Greedy tokens of all prompts under one case. Retraction is forced by a pool that cannot hold them all."""
    work = prompts()
    page = case["page"]
    need = -(-(max(map(len, work)) + OUT + 2) // page)
    pages = need + 1 if case["retract"] else 1200 // page
    pages += pages % 2 if "cp=2" in mesh else 0  # two ranks share them
    no_host = case["prefix"] == "cold" or case["layout"][0] == "hybrid" or "cp=2" in mesh  # what has no host tier
    host = 0.0 if case["tier"] == "device" or no_host else HOST
    with Engine(
        model=str(model), mesh=mesh, core="process" if mesh else "inproc", page_size=page, num_pages=pages, prefill_chunk=case["chunk"],
        overlap_depth=case["overlap"], enable_prefix_caching=case["prefix"] == "hit", max_num_seqs=8, max_num_batched_tokens=64,
        buckets=[1, 4, 8, 16, 64], max_model_len=128, host_kv_gib=host,
    ) as engine:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True, detokenize=False)
        first = engine.generate(input_ids=work[:2], sampling_params=params)
        rest = engine.generate(input_ids=work, sampling_params=params)
        stats = engine.control("stats")
    assert [r.token_ids for r in first] == [r.token_ids for r in rest[:2]], (
        "a second run (prefix hit) changed the tokens"
    )
    if case["prefix"] == "hit" and not case["retract"]:
        assert stats["prefix_hit_tokens"] > 0
    if host:
        assert stats["write_back_pages"] > 0
    if case["prefix"] == "cold":
        assert stats["prefix_hit_tokens"] == 0
    if case["retract"] and "dp" not in mesh and case["chunk"] in (0, 64):  # short chunks admit one by one
        assert stats["retractions"] > 0, "the pool was meant to be too small"
    return [r.token_ids for r in rest]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_tiny(root / name, kind, **over) for name, (kind, over) in MODELS.items()}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, list[list[int]]]:
    plain = {
        "page": 16,
        "chunk": 0,
        "prefix": "cold",
        "overlap": 0,
        "retract": False,
        "tier": "device",
        "layout": ("", ""),
    }
    return {name: generate(path, "", plain) for name, path in models.items()}


def test_pairs_are_covered() -> None:
    found = pairwise(FACTORS)
    for a, b in itertools.combinations(FACTORS, 2):
        assert len({(str(c[a]), str(c[b])) for c in found}) == len(FACTORS[a]) * len(FACTORS[b])


@pytest.mark.timeout(3600)
def test_tokens_depend_on_nothing_but_the_prompt(
    models: dict[str, Path], expected: dict[str, list[list[int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = cases()
    for case in found:
        name, mesh = case["layout"]
        assert generate(models[name], mesh, case) == expected[name], case
    with capsys.disabled():
        print(f"\n  {len(found)} cases of {len(list(itertools.product(*FACTORS.values())))}: equal tokens")
