"""Our engine on one GPU with made-up weights, in the scenarios of its peer: `python -m benchmarks.gpu.engine --model
qwen3-0.6b --scenario steps,decode,long --json FILE`.

    steps       graph replays alone, back to back: ms a decode step, without scheduler, front and transport
    decode      128 tokens for each of 1 .. 256 requests on 1,024 tokens of context that are in the prefix cache
    long        64 tokens for 1, 4, 16 requests on 32,768 tokens
    prefill     time to the first token of 1,024 / 8,192 / 32,768 new tokens, median of 5 (32k: 3)
    append      the same for 800 tokens on a cached prefix of 50,000
    throughput  256 requests at once, 100 to 1,024 tokens in and out
    agentic     conversations of 50,000 tokens, then 5 turns of 800 more, 200 out each, at concurrency 1, 4, 8

The front runs here (AsyncLLM), the engine core in its own process; no HTTP, no tokenizer. Times are taken where the
caller sees a token; `tpot_ms` is the median over requests, the first 8 tokens skipped. Every decode row has the bytes a
step must read (weights once, KV of the contexts) and what share of a device copy of the same run that makes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1003, "max_position_embeddings": 65536,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"qwen3-0.6b": QWEN_06B, "llama-3.1-8b": LLAMA_8B, "tiny": TINY}
MAX_LEN = {"qwen3-0.6b": 40960, "llama-3.1-8b": 65536, "tiny": 65536}
DECODE_BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
PREFILL_BUCKETS = [
    320, 384, 448, 512, 576, 640, 704, 768, 832, 896, 960, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192,
]  # fmt: skip


def step_bytes(c: dict[str, Any]) -> tuple[int, int]:
    """bf16 bytes that a decode step reads: weights, and KV a token of context."""
    h, d, n, kv = (c[k] for k in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"))
    layer = h * (2 * n + 2 * kv) * d + 3 * h * c["intermediate_size"]
    return 2 * (c["num_hidden_layers"] * layer + h * c["vocab_size"]), 4 * kv * d * c["num_hidden_layers"]


class Bench:
    """One engine and its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.config = args, MODELS[args.model]
        self.random = random.Random(args.seed)
        self.began = time.time()
        self.folder = Path(tempfile.mkdtemp(prefix="tokenspeed-bench-"))
        (self.folder / "config.json").write_text(json.dumps(self.config))
        self.weights, self.kv = step_bytes(self.config)
        self.out: dict[str, Any] = {"engine": "tokenspeed", "model": args.model, "versions": versions(args.commit)}

    def say(self, text: str) -> None:
        print(f"[{self.args.model} {time.time() - self.began:6.1f}s] {text}", flush=True)

    def save(self) -> None:
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(self.out, indent=1))

    def options(self) -> dict[str, Any]:
        """Of an engine that serves the compiled artifact: a start does not compile the model."""
        from tokenspeed.runtime.ahead import compile_kernels
        from tokenspeed.runtime.compiling import compile_options, write_artifact
        from tokenspeed.runtime.config import EngineConfig
        from tokenspeed.runtime.executor import default_page

        artifact = self.folder / "artifact"
        if not artifact.exists():
            compiled = EngineConfig(
                model=str(self.folder), load_format="dummy", device=self.args.device, dtype="bfloat16", seed=0,
                max_num_seqs=256, max_num_batched_tokens=self.args.chunk,
                buckets=DECODE_BUCKETS + [b for b in PREFILL_BUCKETS if b <= self.args.chunk],
            )  # fmt: skip
            began = time.perf_counter()
            write_artifact(compiled, compile_options(compiled), str(artifact))
            self.out["compile_s"] = round(time.perf_counter() - began, 2)
            if self.args.device != "cpu":
                began = time.perf_counter()
                kernels = compile_kernels(artifact, default_page(self.args.device))
                self.out["kernels"] = {"count": kernels, "seconds": round(time.perf_counter() - began, 2)}
        return {
            "model": str(artifact), "max_model_len": MAX_LEN[self.args.model], "core": self.args.core,
            "num_pages": self.args.pages,
        }  # fmt: skip

    def prompt(self, tokens: int) -> list[int]:
        return [self.random.randrange(10, self.config["vocab_size"] - 10) for _ in range(tokens)]

    # ---- the executor alone ------------------------------------------------------------------------------------------

    def steps(self) -> list[dict[str, Any]]:
        """ms a replay of the decode graphs, in an engine core of this process that no request reaches."""
        import torch

        from tokenspeed.runtime.build import build_engine
        from tokenspeed.runtime.config import EngineConfig

        self.out["copy_gbps"] = copy_rate()
        options = EngineConfig(**self.options())
        started = time.perf_counter()
        built = build_engine(options)
        executor: Any = built.ranks.executor
        self.out["start"] = {"seconds": round(time.perf_counter() - started, 2), **rounded(executor.seconds)}
        self.out["memory"] = executor.memory() | {"free": torch.cuda.mem_get_info()[0]}
        self.say(f"ready in {self.out['start']}, memory {self.out['memory']}, copy {self.out['copy_gbps']} GB/s")
        rows = []
        for tokens, context in ((800, 50800), (1024, 1024), (8192, 8192)):
            if context < min(built.kv_tokens, MAX_LEN[self.args.model]) and tokens <= self.args.chunk:
                rows.append(
                    {"tokens": tokens, "context": context} | self.replays(executor, 1, context, tokens, count=5)
                )
                self.say(f"steps {tokens} tokens of {context}: {rows[-1]}")
        for batch, context in [(b, c) for c in (1024, 32768) for b in (1, 4, 16, 64, 256)]:
            if (
                batch not in DECODE_BUCKETS
                or batch * context > built.kv_tokens
                or context > MAX_LEN[self.args.model] - 64
            ):
                continue
            rows.append({"batch": batch, "context": context} | self.replays(executor, batch, context))
            self.say(f"steps {batch} x {context}: {rows[-1]}")
        built.ranks.close()
        return rows

    def replays(self, executor: Any, batch: int, context: int, tokens: int = 1, count: int = 40) -> dict[str, Any]:
        """Decode of `batch` requests, or the last `tokens` tokens of one, at `context` positions."""
        import torch

        from tokenspeed.runtime.tuning import step_of

        step = step_of(executor, batch, context, tokens)
        bucket = step.bucket
        for _ in executor.done:  # every slot of the ring holds the step
            executor.run(step)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(executor.gpu.stream):
            begin.record(executor.gpu.stream)
            for _ in range(count):
                executor.replays["gumbel", bucket]()
            end.record(executor.gpu.stream)
        torch.cuda.synchronize()
        executor.turn = (executor.turn + count) % len(executor.done)
        ms = begin.elapsed_time(end) / count
        pending, host = None, []
        began = time.perf_counter()
        for _ in range(count):
            t = time.perf_counter()
            launched = executor.launch(step)
            host.append(time.perf_counter() - t)
            if pending:
                pending()
            pending = launched
        assert pending is not None
        pending()
        looped = (time.perf_counter() - began) / count * 1e3
        if self.args.profile:
            self.profile(executor, bucket, f"{batch} x {tokens} x {context}")
        return {
            "replay_ms": round(ms, 4), "overlapped_ms": round(looped, 4),
            "launch_us": round(statistics.median(host) * 1e6, 1), **self.share(batch, context, ms),
        }  # fmt: skip

    def profile(self, executor: Any, bucket: int, name: str) -> None:
        """Device microseconds of a replay by kernel, gaps between kernels apart."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as recorded, executor.gpu.current():
            for _ in range(4):
                executor.replays["gumbel", bucket]()
            torch.cuda.synchronize()
        executor.turn = (executor.turn + 4) % len(executor.done)
        kernels = sorted((e for e in recorded.events() or [] if e.device_time > 0), key=lambda e: e.time_range.start)
        total: dict[str, list[float]] = {}
        for e in kernels:
            total.setdefault(e.name[:60], []).append(e.device_time)
        table = sorted(((sum(v) / 4, len(v) / 4, k) for k, v in total.items()), reverse=True)
        self.out.setdefault("profile", {})[name] = [{"us": round(a, 1), "count": b, "kernel": c} for a, b, c in table]
        for us, count, kernel in table[:14]:
            self.say(f"  {name}: {us:9.1f} us in {count:5.0f} of {kernel}")

    def share(self, batch: int, context: float, ms: float) -> dict[str, Any]:
        moved = self.weights + batch * context * self.kv
        row: dict[str, Any] = {"gbps": round(moved / ms / 1e6, 1)}
        if copy := self.out.get("copy_gbps"):
            row |= {"floor_ms": round(moved / copy / 1e6, 3), "of_copy": round(moved / ms / 1e6 / copy, 3)}
        return row

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        from tokenspeed.runtime.async_llm import AsyncLLM
        from tokenspeed.runtime.config import EngineConfig

        options = EngineConfig(**self.options())
        began = time.perf_counter()
        self.llm = AsyncLLM(options)
        ready = await self.llm.start()
        self.out["ready_s"] = round(time.perf_counter() - began, 2)
        self.out["summary"] = ready.summary
        self.say(f"engine ready in {self.out['ready_s']} s: {ready.summary}")

    async def one(self, ids: list[int], new: int) -> dict[str, Any]:
        from tokenspeed import SamplingParams

        t0 = time.perf_counter()
        stream = await self.llm.submit(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
        marks, out = [], []
        try:
            async for delta in stream:
                if delta.error:
                    raise RuntimeError(delta.error)
                out += delta.token_ids
                marks.append((time.perf_counter(), len(out)))
        finally:
            stream.close()
        assert len(out) == new, (len(out), new)
        row = {"ttft": marks[0][0] - t0, "cached": stream.usage.cached_tokens, "out": out, "marks": marks}
        if new > 1:
            row["tpot"] = (marks[-1][0] - marks[0][0]) / (new - marks[0][1])
        return row

    async def batch(self, prompts: list[list[int]], new: int) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self.one(p, new) for p in prompts))

    async def decode_at(self, prompts: list[list[int]], batches: tuple[int, ...], new: int) -> list[dict[str, Any]]:
        rows = []
        context = len(prompts[0])
        for size in batches:
            group = prompts[:size]
            await self.batch(group, 4)
            times = []
            for r in await self.batch(group, new):
                (ta, na) = next(m for m in r["marks"] if m[1] >= 8)
                (tb, nb) = r["marks"][-1]
                times.append((tb - ta) / (nb - na))
            ms = 1e3 * statistics.median(times)
            rows.append(
                {"batch": size, "context": context, "tpot_ms": round(ms, 4), **self.share(size, context + new / 2, ms)}
            )
            self.say(f"decode {rows[-1]}")
        return rows

    async def decode(self) -> list[dict[str, Any]]:
        prompts = [self.prompt(1024) for _ in range(256)]
        await self.batch(prompts, 1)
        return await self.decode_at(prompts, (1, 4, 16, 64, 256), 128)

    async def long(self) -> list[dict[str, Any]]:
        prompts = [self.prompt(32768) for _ in range(16)]
        for p in prompts:
            await self.one(p, 1)
        return await self.decode_at(prompts, (1, 4, 16), 64)

    async def prefill(self) -> list[dict[str, Any]]:
        rows = []
        for tokens in (1024, 8192, 32768):
            count = 4 if tokens > 30000 else 6  # the first one is left out
            times = [1e3 * (await self.one(self.prompt(tokens), 1))["ttft"] for _ in range(count)][1:]
            row = {"tokens": tokens, "ttft_ms": round(statistics.median(times), 2)}
            rows.append(row | {"all_ms": [round(t, 2) for t in times]})
            self.say(f"prefill {rows[-1]}")
        return rows

    async def append(self) -> dict[str, Any]:
        base = self.prompt(50000)
        cold = await self.one(base, 1)
        runs = [await self.one(base + self.prompt(800), 1) for _ in range(6)]
        row = {
            "prefix": 50000, "append": 800, "ttft_ms": round(1e3 * statistics.median(r["ttft"] for r in runs[1:]), 2),
            "cached": runs[-1]["cached"], "cold_ttft_ms": round(1e3 * cold["ttft"], 1),
        }  # fmt: skip
        self.say(f"append {row}")
        return row | {"decode": await self.decode_at([base], (1,), 64)}

    async def throughput(self) -> dict[str, Any]:
        draw = random.Random(0)
        vocab = self.config["vocab_size"]
        requests = [
            ([draw.randrange(10, vocab - 10) for _ in range(draw.randint(100, 1024))], draw.randint(100, 1024))
            for _ in range(256)
        ]
        runs = []
        for _ in range(3):
            await self.llm.control("flush_cache")
            began = time.perf_counter()
            done = await asyncio.gather(*(self.one(p, n) for p, n in requests))
            runs.append((time.perf_counter() - began, done))
        seconds, done = sorted(runs, key=lambda run: run[0])[1]
        tokens = sum(n for _, n in requests)
        row = {
            "seconds": round(seconds, 3), "output_tokens": tokens, "input_tokens": sum(len(p) for p, _ in requests),
            "output_tps": round(tokens / seconds, 1), "all_tps": [round(tokens / s, 1) for s, _ in runs],
            "ttft_ms": round(1e3 * statistics.median(r["ttft"] for r in done), 1),
            "tpot_ms": round(1e3 * statistics.median(r["tpot"] for r in done), 3),
        }  # fmt: skip
        self.say(f"throughput {row}")
        return row

    async def agentic(self) -> list[dict[str, Any]]:
        rows = []
        for concurrency in (1, 4, 8):
            await self.llm.control("flush_cache")
            texts = [[self.prompt(800 if turn else 50000) for turn in range(6)] for _ in range(concurrency)]

            async def conversation(turns: list[list[int]]) -> list[dict[str, Any]]:
                prompt: list[int] = []
                log = []
                for turn, text in enumerate(turns):
                    prompt = prompt + text
                    r = await self.one(prompt, 200)
                    log.append({"turn": turn, "prompt": len(prompt), **{k: r[k] for k in ("cached", "ttft", "tpot")}})
                    prompt = prompt + r["out"]
                return log

            began = time.perf_counter()
            logs = [x for s in await asyncio.gather(*map(conversation, texts)) for x in s]
            seconds = time.perf_counter() - began
            later = [x for x in logs if x["turn"]]
            rows.append({
                "concurrency": concurrency, "seconds": round(seconds, 2),
                "ttft_first_ms": round(1e3 * statistics.median(x["ttft"] for x in logs if not x["turn"]), 1),
                "ttft_later_ms": round(1e3 * statistics.median(x["ttft"] for x in later), 2),
                "tpot_median_ms": round(1e3 * statistics.median(x["tpot"] for x in logs), 3),
                "hit_rate_later": round(sum(x["cached"] for x in later) / sum(x["prompt"] for x in later), 4),
            })  # fmt: skip
            self.say(f"agentic {rows[-1]}")
        return rows

    async def requests(self, scenarios: list[str]) -> None:
        await self.start()
        try:
            for name in scenarios:
                if time.time() - self.began > self.args.budget:
                    self.out[name] = {"skipped": "no time was left"}
                    continue
                self.out[name] = await getattr(self, name)()
                self.save()
        finally:
            await self.llm.close()


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {k: round(v, 2) for k, v in values.items()}


def copy_rate() -> float:
    """GB/s read and written by a device copy of 2 GiB, by a kernel, on a warm card."""
    import torch

    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    for _ in range(300):
        torch.neg(a, out=b)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 0.0
    for _ in range(5):
        begin.record()
        torch.neg(a, out=b)
        torch.neg(a, out=b)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 4 * a.nbytes / begin.elapsed_time(end) / 1e6)
    return round(best, 1)


def versions(commit: str) -> dict[str, str]:
    import torch
    import triton

    if not commit:
        head = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"commit": commit, "torch": torch.__version__, "triton": triton.__version__, "gpu": gpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-0.6b")
    parser.add_argument("--scenario", default="steps,decode,long", help="names from the list above, with commas")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no scenario starts")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one step at most")
    parser.add_argument("--pages", type=int, default=0, help="KV pages; 0: what the memory holds")
    parser.add_argument("--core", choices=("process", "inproc"), default="process", help="where the engine core runs")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the scenarios without a GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", default="", help="what is measured, where git is not at hand; none: HEAD")
    parser.add_argument("--profile", action="store_true", help="with `steps`: the time of each kernel")
    args = parser.parse_args()
    bench = Bench(args)
    names = args.scenario.split(",")
    if "steps" in names:
        bench.out["steps"] = bench.steps()
        bench.save()
    if rest := [n for n in names if n != "steps"]:
        asyncio.run(bench.requests(rest))
    bench.save()


if __name__ == "__main__":
    main()
