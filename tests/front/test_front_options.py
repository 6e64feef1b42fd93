"""The table of options and what is generated from it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tokenspeed.runtime import options
from tokenspeed.runtime.config import EngineConfig, ServerConfig
from tokenspeed.runtime.options import OptionError

DOCS = Path(__file__).parents[2] / "docs"


def parse(*argv: str, environ: dict[str, str] | None = None) -> EngineConfig:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser, EngineConfig)
    return options.from_args(EngineConfig, parser.parse_args(argv), environ or {})


def test_docs_page_is_fresh() -> None:
    assert (DOCS / "options.md").read_text("utf-8") == options.markdown(EngineConfig, ServerConfig)


def test_every_option_says_what_it_does() -> None:
    rows = options.table(EngineConfig) + options.table(ServerConfig)
    assert all(len(row.help) > 5 for row in rows)
    assert len({row.env for row in rows}) == len(rows)


def test_precedence_is_flag_environment_default() -> None:
    assert parse("m").max_num_seqs == 256
    assert parse("m", environ={"TOKENSPEED_MAX_NUM_SEQS": "8"}).max_num_seqs == 8
    assert parse("m", "--max-num-seqs", "9", environ={"TOKENSPEED_MAX_NUM_SEQS": "8"}).max_num_seqs == 9
    assert parse(environ={"TOKENSPEED_MODEL": "x"}).model == "x"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--buckets", "1,2,8"], "buckets", [1, 2, 8]),
        (["--seed", "7"], "seed", 7),
        (["--seed", "none"], "seed", None),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["--chunked-prefill-size", "64"], "prefill_chunk", 64),
        (["--gpu-memory-utilization", "0.5"], "memory_fraction", 0.5),
        (["--overlap-depth", "0"], "overlap_depth", 0),
    ],
)
def test_flags(argv: list[str], name: str, value: object) -> None:
    assert getattr(parse("m", *argv), name) == value


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dtype": "float7"}, "dtype is 'float7': expected one of auto, float32, bfloat16"),
        ({"max_model_len": 1}, "max_model_len is 1: must be 0 (the model's own limit), or 2 and more"),
        ({"max_model_len": -1}, "max_model_len is -1: must be 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: must be at least 1"),
        ({"kv_events": 2**31}, f"kv_events is {2**31}: must be at most {2**31 - 1}"),
        ({"host_kv_gib": float("nan")}, "host_kv_gib is nan: must be"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many': expected an integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True: expected an integer"),
        ({"memory_fraction": -0.1}, "memory_fraction is -0.1: must lie in"),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan: must lie in"),
        ({"mesh": "tp"}, "mesh is 'tp': expected AXIS=SIZE"),
        ({"mesh": "tp=2,tp=2"}, "an axis is given twice"),
        ({"mesh": "tp=0"}, "mesh is 'tp=0'"),
        ({"axes": "mlp"}, "axes is 'mlp': expected LOGICAL=MESH"),
        ({"buckets": [4, 2]}, "buckets is [4, 2]: must be positive and ascending"),
        ({"buckets": ["4"]}, "buckets is ['4']: expected integers"),
        ({"overlap_depth": 2}, "overlap_depth is 2: expected one of 0, 1"),
        ({"tensor_parallel_size": 2, "mesh": "tp=2"}, "give one of them"),
        ({"model": "a.py:B"}, "needs config"),
        ({"max_num_seq": 3}, "did you mean max_num_seqs?"),
        ({"port": 1}, "port is no option of EngineConfig"),
    ],
)
def test_a_wrong_value_names_the_option_and_the_fix(values: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        options.load(EngineConfig, {"model": "m", **values}, {})
    assert says in str(caught.value)


def test_a_wrong_environment_variable_is_named() -> None:
    with pytest.raises(OptionError, match="TOKENSPEED_PAGE_SIZE: page_size is 'x': expected an integer"):
        parse("m", environ={"TOKENSPEED_PAGE_SIZE": "x"})


def test_a_missing_model_is_named() -> None:
    with pytest.raises(OptionError, match="model is missing: give it, or set TOKENSPEED_MODEL"):
        parse()


def test_bad_port() -> None:
    with pytest.raises(OptionError, match=r"port is 70000: must lie in 0\.\.65535"):
        ServerConfig(port=70000)


def test_mesh_axes() -> None:
    assert EngineConfig("m").mesh_axes == {"tp": 1}
    assert EngineConfig("m", tensor_parallel_size=3).mesh_axes == {"tp": 3}
    assert EngineConfig("m", mesh="dp=2,tp=4", axes="mlp=tp,vp=dp*tp").mesh_axes == {"dp": 2, "tp": 4}
