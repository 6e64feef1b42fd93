"""Time of the output parsers, microseconds a token: plain content, a thought, and the arguments of a call.

python benchmarks/parsers.py [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import time

from tokenspeed.runtime.parsers import TOOL_PARSERS, Tool, make_parser

TOKENS = 100_000
WORDS = ("the ", "quick", " brown", "\\n", " fox", ".", " jumps", ":", " over", " 12")
HEADS = {
    "deepseek_v31": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
    "gpt-oss": '<|channel|>commentary to=functions.f<|message|>{"a": "',
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": "',
    "kimi_k2": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "',
    "llama3_json": '{"name": "f", "parameters": {"a": "',
    "minimax_m2": '<invoke name="f"><parameter name="a">',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n",
}


def microseconds(tool: str, reasoning: str | None, head: str) -> float:
    """A token of one character or more, fed alone."""
    chance = random.Random(0)
    tokens = [chance.choice(WORDS) for _ in range(TOKENS)]
    parser = make_parser(tool, reasoning, tools=[Tool("f")])
    parser.feed(head)
    start = time.perf_counter()
    for token in tokens:
        parser.feed(token)
    return (time.perf_counter() - start) / TOKENS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows: dict[str, dict[str, float]] = {}
    for tool in TOOL_PARSERS:
        content = "<|channel|>final<|message|>" if tool in ("gpt-oss", "openai") else ""
        row = {"content": microseconds(tool, None, content)}
        if tool in HEADS:
            row["arguments"] = microseconds(tool, None, HEADS[tool])
        rows[tool] = row
    rows["hermes"]["thought"] = microseconds("hermes", "qwen3", "<think>")
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for tool, row in rows.items():
        print(f"{tool:14}", "  ".join(f"{what} {value:.2f}" for what, value in row.items()), "us/token")


if __name__ == "__main__":
    main()
