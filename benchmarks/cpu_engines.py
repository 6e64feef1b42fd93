"""One engine measured in a process and an environment of its own; benchmarks/cpu_vs_peers.py runs it for each.

    PYTHON cpu_engines.py ENGINE PLAN      (PLAN: JSON, see `Plan`; the figures are the last line printed, as JSON)

Invariant: every engine answers the same prompts of token ids, greedily, with as many threads, and no figure comes from a
prompt that was seen before (prefix caches find nothing), except where that is what a line measures. Only what is
installed beside an engine is imported, and this file needs no package of the project unless the engine is ours.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]  # all prompts at once, so many tokens each, no end of sequence

PROMPT = 40  # tokens, of a chat's first question
PREFILL, PREFIX, NEW = 1000, 2000, 50  # tokens of a long prompt, of a cached one, and of what follows it
CONTEXTS, STEPS = (100, 8000), 64  # contexts at which steps are timed, and how many


@dataclass(frozen=True)
class Plan:
    """What to measure. `gguf`: the model's file; `weights`: the same weights in bf16, as a Hugging Face directory."""

    lines: list[str]
    rounds: int
    tokens: int  # output tokens a request
    threads: int
    vocab: int
    context: int  # the longest sequence of any line
    gguf: str
    weights: str
    began: float  # time.time() when the process was started


def prompts(plan: Plan, seed: str, count: int, length: int) -> Prompts:
    """Random ids, the same for every engine and never the same twice."""
    draw = random.Random(seed)
    return [[draw.randrange(256, plan.vocab) for _ in range(length)] for _ in range(count)]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- engines -------------------------------------------------------------------------------------------------------


def ours(plan: Plan, dtype: str) -> Generate:
    from tokenspeed import Engine, SamplingParams

    engine = Engine(
        model=plan.gguf, dtype=dtype, max_num_seqs=32, max_model_len=plan.context, threads=plan.threads, log_level="error",
        core=os.environ.get("CPU_ENGINES_CORE", "process"),
    )  # fmt: skip
    atexit.register(engine.close)

    def generate(ids: Prompts, tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate(input_ids=ids, sampling_params=params)
        assert all(len(o.choices[0].token_ids) == tokens for o in outputs)

    return generate


def llama_cpp(plan: Plan) -> Generate:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    llama = Llama(
        plan.gguf, n_ctx=plan.context, n_threads=plan.threads, n_threads_batch=plan.threads, verbose=False, seed=1
    )

    def generate(ids: Prompts, tokens: int) -> None:
        (prompt,) = ids
        stream = llama.generate(prompt, temp=0.0, top_k=1)
        for _ in range(tokens):
            next(stream)
        stream.close()

    return generate


def vllm(plan: Plan) -> Generate:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(plan.weights, dtype="bfloat16", max_model_len=plan.context, max_num_seqs=32)

    def generate(ids: Prompts, tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)

    return generate


def transformers(plan: Plan) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(plan.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(plan.weights, dtype=torch.bfloat16)

    def generate(ids: Prompts, tokens: int) -> None:
        out = model.generate(torch.tensor(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        assert out.shape[1] == len(ids[0]) + tokens

    return generate


def save_weights(plan: Plan) -> None:
    """The file's weights, dequantised to bf16, as a Hugging Face directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = Path(plan.gguf)
    kind = GgufConfig(gguf_file=file.name, dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=kind
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(plan.weights)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(plan.weights)


ENGINES: dict[str, Callable[[Plan], Generate]] = {
    "ours": lambda plan: ours(plan, "auto"),
    "ours_bf16": lambda plan: ours(plan, "bfloat16"),
    "llama_cpp": llama_cpp,
    "vllm": vllm,
    "transformers": transformers,
}


# ---- lines: a figure a round ---------------------------------------------------------------------------------------


def decode_1(plan: Plan, generate: Generate, seed: str) -> float:
    """Tokens a second after the first, of one request."""
    first = seconds(lambda: generate(prompts(plan, f"{seed} first", 1, PROMPT), 1))
    whole = seconds(lambda: generate(prompts(plan, f"{seed} whole", 1, PROMPT), plan.tokens))
    return (plan.tokens - 1) / (whole - first)


def batch(count: int) -> Callable[[Plan, Generate, str], float]:
    """Output tokens a second of so many requests at once, their prompts included."""

    def line(plan: Plan, generate: Generate, seed: str) -> float:
        asked = prompts(plan, seed, count, PROMPT)
        return count * plan.tokens / seconds(lambda: generate(asked, plan.tokens))

    return line


def prefill(plan: Plan, generate: Generate, seed: str) -> float:
    """Prompt tokens a second."""
    asked = prompts(plan, seed, 1, PREFILL)
    return PREFILL / seconds(lambda: generate(asked, 1))


def cached(plan: Plan, generate: Generate, seed: str) -> float:
    """The time to the first token of new tokens on a cached prefix over that of as many tokens alone."""
    (prefix,) = prompts(plan, "prefix", 1, PREFIX)
    generate([prefix], 1)
    alone = seconds(lambda: generate(prompts(plan, f"{seed} alone", 1, NEW), 1))
    (new,) = prompts(plan, f"{seed} new", 1, NEW)
    return seconds(lambda: generate([prefix + new], 1)) / alone


def context(plan: Plan, generate: Generate, seed: str) -> list[float]:
    """Milliseconds of a step of one request at each of CONTEXTS; the prompts are the same in each round, and cached."""
    out: list[float] = []
    for length in CONTEXTS:
        asked = prompts(plan, "context", 1, length)
        generate(asked, 1)
        first = seconds(lambda asked=asked: generate(asked, 1))
        out.append(1e3 * (seconds(lambda asked=asked: generate(asked, STEPS)) - first) / (STEPS - 1))
    return out


LINES: dict[str, Callable[[Plan, Generate, str], Any]] = {
    "decode_1": decode_1, "batch_8": batch(8), "batch_32": batch(32), "prefill": prefill, "cached": cached, "context": context,
}  # fmt: skip


def main() -> None:
    plan = Plan(**json.loads(sys.argv[2]))
    if sys.argv[1] == "weights":
        return save_weights(plan)
    generate = ENGINES[sys.argv[1]](plan)
    generate(prompts(plan, "start", 1, PROMPT), 1)
    report: dict[str, Any] = {"start_s": time.time() - plan.began}
    for name in plan.lines:
        line = LINES[name]
        line(plan, generate, f"{name} warm")
        report[name] = [line(plan, generate, f"{name} {i}") for i in range(plan.rounds)]
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
