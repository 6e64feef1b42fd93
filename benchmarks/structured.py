"""What structured output costs: `python benchmarks/structured.py [--json] [--model MODEL] [--tokens N] [--rows N]`.

    table_ms         the tokenizer as the grammar engine sees it, once a process
    compile_ms       a grammar, by kind of structure, its first masks included; kept: the same once more
    mask_us          a token taken and the next mask worked out, by kind, along outputs that the model gave: median and p99
    step_ms          a decode step of N requests: free, free in the full sampler, and with structure; median between tokens

The model runs on this machine; masks are worked out by the core process, side by side for all requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.grammar import Structure
from tokenspeed.runtime.grammar.compiler import Grammars
from tokenspeed.runtime.tokenizer import load_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                    "required": ["street", "zip"], "additionalProperties": False},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}  # fmt: skip
TEXT = '{"name": "John Smith the third", "age": 42, "tags": ["a", "c"], "address": {"street": "12, rue Léon", "zip": "12345"}}'
KINDS = {
    "json_schema": (Structure.schema(PERSON), TEXT),
    "json_object": (Structure("json_object"), TEXT),
    "regex": (Structure("regex", r"(\w+@\w+\.com[,\n])+"), "someone@example.com,another@example.com\n"),
    "choice": (Structure.choice([f"the choice of number {i}" for i in range(200)]), "the choice of number 123"),
    "grammar": (Structure("grammar", 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'), "1+(22+(333+4))+55"),
    "wide schema": (
        Structure.schema({"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(200)}}),
        '{"property_7": "some text of a value", "property_150": "x"}',
    ),
}


def measured(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def spread(seconds: list[float], scale: float) -> dict[str, float]:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered) * scale, 2), "p99": round(p99 * scale, 2)}


def matchers(model: str) -> dict[str, Any]:
    tokenizer = load_tokenizer(EngineConfig(model))
    assert tokenizer is not None, "the model has no tokenizer"
    seconds, grammars = measured(lambda: Grammars(tokenizer))
    out: dict[str, Any] = {"table_ms": round(seconds * 1e3, 1), "compile_ms": {}, "kept_us": {}, "mask_us": {}}
    for name, (structure, text) in KINDS.items():
        out["compile_ms"][name] = round(measured(lambda s=structure: grammars.compile(s))[0] * 1e3, 2)
        again = [measured(lambda s=structure: grammars.matcher(s, [2]))[0] for _ in range(50)]
        out["kept_us"][name] = spread(again, 1e6)["p50"]
        times: list[float] = []
        for _ in range(20):
            m = grammars.matcher(structure, [2])
            for token in tokenizer.encode(text, add_special_tokens=False):
                times.append(measured(lambda m=m, token=token: (m.consume(token), m.fill()))[0])
                assert not m.error, m.error
        out["mask_us"][name] = spread(times, 1e6)
    return out


def steps(model: str, rows: int, tokens: int) -> dict[str, Any]:
    endless = Structure("regex", "[a-z ,.]{1,100000}")
    likely = Structure.schema({"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 400})
    out: dict[str, Any] = {}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("free", {}), ("full sampler", {"logit_bias": {0: -1.0}}), ("regex", {"structure": endless}),
        ("json_schema", {"structure": likely}),
    ]  # fmt: skip
    for depth in (0, 1):
        with Engine(model, overlap_depth=depth, max_num_seqs=rows, buckets=[1, rows, 64]) as engine:
            for name, more in cases:
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)
                engine.generate(prompt=["A list:"] * rows, sampling_params=[params] * rows)  # compiled and cached
                gaps: list[float] = []
                streams = [engine.generate(prompt="A list:", sampling_params=params, stream=True) for _ in range(rows)]
                for stream in streams[1:]:
                    next(stream)
                last = None
                for _ in streams[0]:
                    now = time.perf_counter()
                    gaps += [now - last] if last else []
                    last = now
                for stream in streams[1:]:
                    stream.close()  # pyright: ignore
                out.setdefault(name, {})[f"depth {depth}"] = round(statistics.median(gaps) * 1e3, 3)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = {
        "model": args.model,
        **matchers(args.model),
        "rows": args.rows,
        "step_ms": steps(args.model, args.rows, args.tokens),
    }
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:12} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
