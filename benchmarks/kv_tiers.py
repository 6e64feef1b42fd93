"""What a prompt's first token takes where its prefix is computed, and where it is found in each tier.

    python -m benchmarks.kv_tiers [--model smollm2] [--tokens 1900] [--prompts 5] [--json]

Prompts of random tokens, one after the other on an idle engine: never seen, again (on the device), after the device's cache was
emptied (in host memory), and in an engine started anew (in storage, a temporary folder). Medians in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

from tokenspeed import Engine, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
TIERS = ("device", "host", "storage")


def ask(engine: Engine, prompt: list[int], tier: str) -> float:
    """Milliseconds to the first token of a prompt that is found in `tier`, "" for nowhere; returns when all is at rest again."""
    began = time.perf_counter()
    usage = engine.generate(input_ids=prompt, sampling_params=ONE).usage
    took = 1e3 * (time.perf_counter() - began)
    found = dict(zip(TIERS, (usage.cached_device, usage.cached_host, usage.cached_storage)))
    wrong = [name for name, tokens in found.items() if (tokens > 0.9 * len(prompt)) != (name == tier)]
    assert not wrong, f"{found} of {len(prompt)} tokens, for {tier or 'none'}"
    settle(engine)
    return took


def settle(engine: Engine) -> None:
    """Returns when nothing runs and nothing moves."""
    while True:
        seen = engine.control("scheduler")
        moving = any(n for name, n in seen["stats"].items() if name.endswith("_in_flight"))
        if not moving and not seen["requests"]:
            return
        time.sleep(0.01)


def measure(model: str, tokens: int, prompts: int) -> dict[str, float]:
    """Median milliseconds by where the prefix was."""
    rng = random.Random(1)
    work = [[rng.randrange(1, 1000) for _ in range(tokens)] for _ in range(prompts + 1)]
    took: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "model": model, "core": "inproc", "max_model_len": tokens + 64, "max_num_seqs": 4, "num_pages": tokens // 4,
            "page_size": 16, "host_kv_gib": 4.0, "kv_storage": f"file://{folder}?limit=64GiB",
        }  # fmt: skip
        with Engine(**options) as engine:
            ask(engine, work[0], "")  # first uses
            for prompt in work[1:]:
                took["computed"].append(ask(engine, prompt, ""))
                took["device"].append(ask(engine, prompt, "device"))
                engine.control("flush_cache", tier="device")
                took["host"].append(ask(engine, prompt, "host"))
        with Engine(**options) as engine:
            ask(engine, work[0], "storage")
            took["storage"] = [ask(engine, prompt, "storage") for prompt in work[1:]]
    return {where: statistics.median(values) for where, values in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1900)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    took = measure(args.model, args.tokens, args.prompts)
    if args.json:
        print(json.dumps({f"{where}_ms": ms for where, ms in took.items()}))
        return
    for where, ms in took.items():
        print(f"{where:<10} {ms:10.1f} ms  {took['computed'] / ms:6.1f} times as fast as computed")


if __name__ == "__main__":
    main()
