"""Other weights in a running engine: the tokens of an engine that started with them, and no request sees both."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.tiny import tiny_config, tiny_model, tiny_weights
from tokenspeed import Engine, SamplingParams, send_weights
from tokenspeed.runtime.async_llm import AsyncLLM
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import QueueFullError, RequestError, StartupError, UnavailableError

PROMPT = [7, 3, 99, 250] * 6
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "core": "inproc",
    "num_pages": 64,
    "max_num_seqs": 4,
    "buckets": [1, 4, 32],
    "max_num_batched_tokens": 32,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    wide = tiny_model(folder / "wide", intermediate_size=128)
    return {"old": tiny_model(folder / "old"), "new": tiny_model(folder / "new", seed=1), "wide": wide}


def tokens(engine: Engine) -> list[int]:
    return engine.generate(input_ids=PROMPT, sampling_params=PARAMS).token_ids


@pytest.fixture(scope="module")
def wanted(models: dict[str, Path]) -> Iterator[dict[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for name in ("old", "new"):
        with Engine(str(models[name]), **OPTIONS) as engine:
            found[name] = tokens(engine)
    assert found["old"] != found["new"]
    yield found


@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2"])
def test_the_new_weights_are_those_of_an_engine_that_starts_with_them(
    models: dict[str, Path], wanted: dict[str, list[int]], mesh: str
) -> None:
    with Engine(str(models["old"]), **OPTIONS, mesh=mesh) as engine:
        assert tokens(engine) == wanted["old"]
        assert engine.update_weights(str(models["new"]))["seconds"] > 0
        assert tokens(engine) == wanted["new"]  # of nothing that the prefix cache kept
        engine.update_weights(str(models["old"]))
        assert tokens(engine) == wanted["old"]


def test_weights_that_do_not_fit_change_nothing(
    models: dict[str, Path], wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    broken = tiny_model(tmp_path / "broken")
    weights = tiny_weights(tiny_config())
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors")
    with Engine(str(models["old"]), **OPTIONS, mesh="tp=2") as engine:
        for path, word in ((models["wide"], "intermediate_size"), (tmp_path / "none", "none"), (broken, "up_proj")):
            with pytest.raises(RequestError, match=word) as caught:
                engine.update_weights(str(path))
            assert caught.value.param == "path"
        assert tokens(engine) == wanted["old"]


async def test_requests_end_before_and_begin_after(models: dict[str, Path], wanted: dict[str, list[int]]) -> None:
    """A reader/writer lock: what is in flight ends on the old weights, what comes meanwhile waits for the new ones."""
    llm = AsyncLLM(EngineConfig(str(models["old"]), **OPTIONS, max_queued_requests=2))
    await llm.start()
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    running = [await llm.submit(PROMPT, long) for _ in range(3)]
    update = asyncio.create_task(llm.update_weights(str(models["new"])))
    await asyncio.sleep(0)
    late = [asyncio.create_task(llm.submit(PROMPT, PARAMS)) for _ in range(6)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await llm.submit(PROMPT, PARAMS)
    old = [(await stream.collect()).token_ids for stream in running]
    assert all(len(ids) == 200 and ids[:12] == wanted["old"] for ids in old)
    assert (await update)["seconds"] > 0
    assert [(await (await task).collect()).token_ids for task in late] == [wanted["new"]] * 6
    await llm.close()


async def test_requests_may_be_ended_for_it(models: dict[str, Path], wanted: dict[str, list[int]]) -> None:
    llm = AsyncLLM(EngineConfig(str(models["old"]), **OPTIONS))
    await llm.start()
    endless = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)
    stream = await llm.submit(PROMPT, endless)
    with pytest.raises(UnavailableError, match="did not end"):
        await llm.update_weights(str(models["new"]), patience=0.0)
    assert len((await stream.collect()).token_ids) == 480
    stream = await llm.submit(PROMPT, endless)
    await llm.update_weights(str(models["new"]), abort=True)
    assert (await stream.collect()).finish_reason == "abort"
    assert (await (await llm.submit(PROMPT, PARAMS)).collect()).token_ids == wanted["new"]
    await llm.close()


# ---- tensors over a socket


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_tensors_that_are_sent_are_those_of_an_engine_that_starts_with_them(
    models: dict[str, Path], wanted: dict[str, list[int]], tmp_path: Path, mesh: str
) -> None:
    path = str(tmp_path / "weights")
    with Engine(str(models["old"]), **OPTIONS, mesh=mesh, weights_socket=path) as engine:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert tokens(engine) == wanted["old"]
        for name in ("new", "old", "new"):
            assert send_weights(path, tensors_of(models[name]))["seconds"] > 0
            assert tokens(engine) == wanted[name]
    assert not os.path.exists(path)


def test_tensors_that_do_not_fit_change_nothing(
    models: dict[str, Path], wanted: dict[str, list[int]], tmp_path: Path
) -> None:
    path = str(tmp_path / "weights")
    new = tensors_of(models["new"])
    lacking = {name: t for name, t in new.items() if "up_proj" not in name}
    wrong = new | {"model.norm.weight": torch.ones(7)}
    stranger = new | {"model.more.weight": torch.ones(7)}
    with Engine(str(models["old"]), **OPTIONS, weights_socket=path) as engine:
        for tensors, word in ((lacking, "up_proj"), (wrong, "norm"), (stranger, "model.more"), ({}, "no tensors")):
            with pytest.raises(RequestError, match=word):
                send_weights(path, tensors)
            assert tokens(engine) == wanted["old"]
        with pytest.raises(RequestError, match="int64"):
            send_weights(path, {"x": torch.ones(2, dtype=torch.int64)})
        send_weights(path, new)
        assert tokens(engine) == wanted["new"]


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        (b"GET / HTTP/1.1\r\n", "first line"),
        (b"[]\n", "first line"),
        (b'{"bytes": "9"}\n', "first line"),
        (b'{"bytes": true}\n', "first line"),
        (b'{"bytes": 9, "abort": 1}\n' + b"x" * 9, "first line"),
        (b"x" * 5000, "first line"),
        (b'{"bytes": 4611686018427387904}\n', "no room"),
        (b'{"bytes": 100}\nshort', "95 of 100"),
        (b'{"bytes": 100}\n' + b"x" * 100, "cannot be read"),
    ],
)
def test_what_is_no_weights_is_refused_with_the_reason(
    refusing: Engine, wanted: dict[str, list[int]], sent: bytes, word: str
) -> None:
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(refusing.config.weights_socket)
        sender.sendall(sent)
        sender.shutdown(socket.SHUT_WR)
        answer = json.loads(sender.makefile().readline())
    assert word in answer["error"]
    assert tokens(refusing) == wanted["old"]


@pytest.fixture(scope="module")
def refusing(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("socket") / "weights"
    with Engine(str(models["old"]), **OPTIONS, weights_socket=str(path)) as engine:
        yield engine


def test_a_socket_is_taken_over_from_the_dead_alone(models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with Engine(str(models["old"]), **OPTIONS, weights_socket=str(path)):
        with pytest.raises(StartupError, match="weights_socket"):
            Engine(str(models["old"]), **OPTIONS, weights_socket=str(path))
        assert path.is_socket()
    path.write_text("a file of somebody's")
    for taken in (path, tmp_path / "no" / "folder", tmp_path / ("long" * 50)):
        with pytest.raises(StartupError, match="weights_socket"):
            Engine(str(models["old"]), **OPTIONS, weights_socket=str(taken))
    assert path.read_text() == "a file of somebody's"
