"""Other names of parsers, as users of vLLM and SGLang pass them; each stands for one of ours."""

from __future__ import annotations

TOOL_ALIASES: dict[str, str] = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "glm47": "glm45",
    "llama3": "llama3_json",
    "llama32": "llama3_json",
    "llama4_pythonic": "pythonic",
    "minimax-m2": "minimax_m2",
    "openai": "gpt-oss",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
}
REASONING_ALIASES: dict[str, str] = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_r1",
    "deepseek_v3": "deepseek_r1",
    "glm47": "glm45",
    "gpt-oss": "gpt_oss",
    "minimax_m2": "minimax",
    "openai_gptoss": "gpt_oss",
    "qwen3-thinking": "deepseek_r1",
}


def tool_parser(name: str) -> str:
    """Our name of a tool parser."""
    return TOOL_ALIASES.get(name, name)


def reasoning_parser(name: str) -> str:
    """Our name of a reasoning parser."""
    return REASONING_ALIASES.get(name, name)
