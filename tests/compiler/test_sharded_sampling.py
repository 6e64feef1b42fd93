"""Every sampling parameter on a sharded vocabulary gives the tokens and log-probabilities of one rank, without its logits
being gathered."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import Tensor

from tests.compiler.sim import compile_tiny, random_weights, tiny
from tokenspeed.compiler import trial
from tokenspeed.compiler.passes.pipeline import Result
from tokenspeed.ir.ops.sampling import NO_LOGPROB, Flag, Word
from tokenspeed.ir.simulate import Simulator
from tokenspeed.ir.text import parse_program

ROWS = 24
PLANS = [
    ("tp=2", ""),
    ("tp=3", ""),
    ("tp=4", "vp=tp,mlp=1"),
    ("a=2,b=2", "tp=a*b,vp=b*a"),
    ("dp=2,tp=2", ""),
    ("a=2,b=3", "tp=a*b,vp=b"),
]


@functools.cache
def compiled(mesh: str, axes: str, vocabulary: int) -> Result:
    groups = 1 if "dp" in mesh or not mesh else 2  # rows a home group: as many in all on every plan
    rows = ROWS * (1 if "dp" in mesh else 2) if mesh else 2 * ROWS
    assert rows * (2 if "dp" in mesh else 1) == 2 * ROWS, groups
    return compile_tiny(tiny(vocab_size=vocabulary), mesh, axes, [(rows, rows)], variants=("full",))


def rows_of_parameters(seed: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Words of 2 * ROWS requests that ask for everything in turn, and a bias of each."""
    rng = random.Random(seed)
    params = torch.zeros(2 * ROWS, 16, dtype=torch.int32)
    floats = params.view(torch.float32)
    for i in range(2 * ROWS):
        flags = Flag.VALID
        for flag in (Flag.PENALTIES, Flag.BIAS, Flag.LOGPROBS, Flag.FILTERS, Flag.MASK):
            flags |= flag if rng.random() < 0.7 else Flag(0)
        flags |= Flag.GREEDY if rng.random() < 0.15 else Flag(0)
        params[i, Word.FLAGS] = 0 if i % 11 == 10 else int(flags)
        params[i, Word.SEED_LO], params[i, Word.POSITION], params[i, Word.SLOT] = rng.randrange(1 << 30), i, i % ROWS
        params[i, Word.TOP_K] = rng.choice([0, 0, 1, 2, 5, 20, vocabulary - 1, vocabulary, 1 << 20])
        params[i, Word.LOGPROBS] = rng.choice([0, 1, 5, 20])
        for word, values in (
            (Word.TEMPERATURE, [0.1, 0.7, 1.0, 3.0]), (Word.TOP_P, [1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]), (Word.MIN_P, [0.0, 0.02, 0.4]),
            (Word.REPETITION, [1.0, 1.3]), (Word.PRESENCE, [0.0, -0.5]), (Word.FREQUENCY, [0.0, 0.25]),
        ):  # fmt: skip
            floats[i, word] = rng.choice(values)
    bias = torch.randn(2 * ROWS, vocabulary, generator=torch.Generator().manual_seed(seed))
    bias[3::7] = bias[3::7].where(
        torch.rand(bias[3::7].shape, generator=torch.Generator().manual_seed(seed)) < 0.2, -torch.inf
    )
    bias[5] = -torch.inf
    return params, bias.double()


def contents(seed: int, vocabulary: int, bias: Tensor) -> list[Tensor]:
    """State of all slots: counts, prompt tokens seen, bias, and packed masks that allow half of the ids, one of them none."""
    g = torch.Generator().manual_seed(seed)
    counts, seen = (torch.randint(0, 2, (2 * ROWS, vocabulary), generator=g) for _ in range(2))
    masks = torch.randint(-(2**31), 2**31, (2 * ROWS, -(-vocabulary // 32)), generator=g)
    masks[7] = 0
    return [counts, seen, bias, masks]


def allowed(masks: Tensor, row: int, token: int) -> bool:
    return bool(int(masks[row, token // 32]) >> token % 32 & 1)


def steps(mesh: str, axes: str, vocabulary: int, seed: int) -> list[list[Tensor]]:
    """Results of two steps on the same logits; the second sees what the first counted."""
    r = compiled(mesh, axes, vocabulary)
    p = parse_program(next(iter(r.texts.values())))
    groups, sim = p.plan.mesh.size(p.plan.home), Simulator(p, trial.runtime_sizes(p))
    number = p.bucket["t"]
    ports = trial.batch(
        p, [[(g * number + i, [(7 * (g * number + i)) % vocabulary], 0) for i in range(number)] for g in range(groups)]
    )
    params, bias = rows_of_parameters(seed, vocabulary)
    if groups == 1:  # the slots of both halves lie in one home block
        params[ROWS:, Word.SLOT] += ROWS
    ports["params"] = params
    caches: dict[str, list[Tensor]] = {}
    given = contents(seed, vocabulary, bias)
    for q in p.all_params():
        for k, t in enumerate(q.types if q.kind == "state" else ()):
            full = torch.zeros([sim.sizes[d.name] for d in t.dims], dtype=sim.dtypes[t.dtype])
            full[:, : given[k].shape[1]] = given[k].to(full.dtype)
            caches[f"{q.name}:{k}"] = sim.meaning.distribute(full, t)
    assert len(caches) == len(given)
    weights = random_weights(r)
    return [sim.run(ports, weights, caches)[0] for _ in range(2)]


@functools.cache
def one_rank(vocabulary: int, seed: int) -> list[list[Tensor]]:
    return steps("", "", vocabulary, seed)


@pytest.mark.parametrize("vocabulary", [61, 509])
@pytest.mark.parametrize(("mesh", "axes"), PLANS)
def test_every_parameter_gives_the_tokens_and_logprobs_of_one_rank(mesh: str, axes: str, vocabulary: int) -> None:
    text = next(iter(compiled(mesh, axes, vocabulary).texts.values()))
    assert "ShardedSampler" in text and " sample " not in text
    for seed in (1, 2):
        found = set()
        for (token, logprob, ids, values), want in zip(steps(mesh, axes, vocabulary, seed), one_rank(vocabulary, seed)):
            assert torch.equal(token, want[0])
            assert torch.allclose(logprob, want[1], rtol=1e-9, atol=1e-9)
            assert torch.equal(ids, want[2])
            assert torch.allclose(values, want[3], rtol=1e-9, atol=1e-9)
            found |= set(token.tolist())
            assert (values[ids < 0] == NO_LOGPROB).all()
        assert len(found) > 8


def test_rows_that_lie_on_every_rank_of_the_vocabulary_keep_whole_logits() -> None:
    text = next(iter(compiled("dp=2,tp=2", "vp=dp*tp", 61).texts.values()))
    assert " sample " in text


def test_no_logits_are_gathered() -> None:
    r = compiled("tp=2", "", 509)
    text = next(iter(r.texts.values()))
    sampler = text[text.index("leaf @ShardedSampler") :].partition("\nmain(")[0]
    lines = [line for line in sampler.splitlines() if "all_reduce" in line or "all_gather" in line]
    assert len(lines) == 15
    assert not any("all_gather" in line or " v" in line.partition(" : ")[2] for line in lines)


@pytest.mark.parametrize("mesh", ["", "tp=3"])
def test_a_row_with_a_mask_draws_only_what_it_allows(mesh: str) -> None:
    """Greedy rows and sampled ones; log-probabilities are of what the mask leaves."""
    params, bias = rows_of_parameters(1, 509)
    masks = contents(1, 509, bias)[3]
    token, logprob, ids, values = steps(mesh, "", 509, 1)[0]
    greedy = free = 0
    for i, flags in enumerate(params[:, Word.FLAGS].tolist()):
        if not flags & Flag.VALID or (i == 7 and flags & Flag.MASK) or (i == 5 and flags & Flag.BIAS):
            assert token[i] == -1  # nothing is left
            continue
        if not flags & Flag.MASK:
            free += not allowed(masks, i, int(token[i]))
            continue
        assert allowed(masks, i, int(token[i]))
        greedy += bool(flags & Flag.GREEDY)
        shown = ids[i][ids[i] >= 0].tolist()
        assert all(allowed(masks, i, k) for k in shown)
        if flags & Flag.LOGPROBS:
            assert torch.isfinite(logprob[i]) and logprob[i] > NO_LOGPROB
            assert float(values[i][ids[i] >= 0].exp().sum()) <= 1.0 + 1e-9
    assert greedy >= 2 and free >= 2
