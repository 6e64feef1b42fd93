"""Scripts that start other engines start this one, or are told which flag does not fit and why."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tokenspeed import cli
from tokenspeed.cli import foreign, serve
from tokenspeed.runtime import options
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.options import OptionError


def parsed(line: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(line.split())
    foreign.apply(args)
    return options.from_args(EngineConfig, args, {}), options.from_args(ServerConfig, args, {})


def test_a_script_of_vllm() -> None:
    engine, server = parsed(
        "smollm2 --served-model-name qwen,haiku --max-model-len 4096 --max-num-seqs 64 --max-num-batched-tokens 2048 "
        "--gpu-memory-utilization 0.9 --tensor-parallel-size 2 --data-parallel-size 4 --enable-expert-parallel "
        "--trust-remote-code --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --dtype auto "
        "--enable-prefix-caching --enable-chunked-prefill --block-size 16 --disable-log-requests --port 8001 --api-key k "
        "--attention-backend auto --generation-config vllm --seed 0 --kv-cache-dtype auto --swap-space 0"
    )
    assert (engine.model, engine.max_model_len, engine.max_num_seqs, engine.page_size) == ("smollm2", 4096, 64, 16)
    assert engine.mesh_axes == {"tp": 2, "dp": 4} and engine.axes == "ep=tp*dp"
    assert (engine.memory_fraction, engine.max_num_batched_tokens, engine.seed) == (0.9, 2048, 0)
    assert (server.tool_call_parser, server.reasoning_parser, server.port) == ("hermes", "qwen3", 8001)


def test_a_script_of_sglang() -> None:
    engine, server = parsed(
        "--model-path smollm2 --tp-size 2 --context-length 4096 --mem-fraction-static 0.8 --chunked-prefill-size 512 "
        "--max-running-requests 32 --disable-radix-cache --enable-metrics --enable-cache-report --host 0.0.0.0 --random-seed 7"
    )
    assert (engine.model, engine.tensor_parallel_size, engine.max_model_len) == ("smollm2", 2, 4096)
    assert not engine.enable_prefix_caching and engine.prefill_chunk == 512 and server.host == "0.0.0.0"


def test_expert_parallelism_goes_with_what_else_is_said() -> None:
    assert parsed("m -tp 4 --enable-expert-parallel")[0].axes == "ep=tp"
    assert parsed("m --mesh dp=4,tp=2 --axes etp=1 --enable-expert-parallel")[0].axes == "etp=1,ep=dp*tp"
    assert parsed("m --enable-expert-parallel")[0].axes == ""


@pytest.mark.parametrize("given", ["https://a.example,http://b", '["https://a.example","http://b"]'])
def test_origins_in_either_form(given: str) -> None:
    assert parsed(f"m --allowed-origins {given}")[1].allowed_origins == "https://a.example,http://b"


@pytest.mark.parametrize(
    "row",
    [row for row in foreign.TABLE if row.harmless is not None and row.carry is None],
    ids=lambda row: row.flags[0],
)
def test_what_does_not_fit_is_refused_with_the_reason(row: foreign.Foreign, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in row.flags:
        value = [] if row.switch else ["something"]
        assert cli.main(["serve", "smollm2", flag, *value]) == 2
        said = capsys.readouterr().err
        assert flag in said and row.why in said
        for harmless in row.harmless or ():
            assert parsed(f"m {flag} {harmless}")[0].model == "m"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("m --model other", "the model is given as 'm' too"),
        ("m --data-parallel-size x", "expected an integer"),
        ("m --data-parallel-size 2 --mesh tp=2", "give one of them"),
        ("m --allowed-origins [x", "JSON list"),
        ("m --kv-cache-dtype fp8", "expected one of auto, float32, bfloat16"),
        ("m --tool-call-parser qwen25000", "expected one of"),
    ],
)
def test_wrong_values_are_named(line: str, says: str) -> None:
    with pytest.raises(OptionError, match=says.replace("[", r"\[")):
        parsed(line)


def test_no_flag_is_there_twice_and_the_page_is_fresh() -> None:
    page = Path(__file__).parents[2] / "docs" / "other-engines.md"
    assert page.read_text("utf-8") == foreign.markdown()
