"""Packed weights kept beside an artifact: the same tokens, and never those of other weights."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.kernels import packing
from tokenspeed.kernels.weights import QuantWeight
from tokenspeed.runtime import packed

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights that are packed, however small a model is."""
    found: list[Any] = []

    def counted(pack: Callable[[Any], Any], weight: Any) -> Any:
        found.append(weight)
        return pack(weight)

    for name in ("_pack_dense", "_pack_quantised"):
        monkeypatch.setattr(packing, name, functools.partial(counted, getattr(packing, name)))
    monkeypatch.setattr(packed, "LEAST", 1)
    return found


def answer(model: Path | str, cache: Path, **more: Any) -> list[int]:
    with Engine(str(model), core="inproc", artifact_cache=str(cache), num_pages=64, max_num_seqs=2, **more) as engine:
        return engine.generate(input_ids=[5, 6, 7, 8], sampling_params=GREEDY).token_ids


def the_file(cache: Path) -> Path:
    (path,) = cache.glob("*/packed-rank0.safetensors")
    return path


def test_a_second_start_packs_nothing_and_gives_the_same_tokens(tmp_path: Path, packs: list[Any]) -> None:
    want = answer("smollm2", tmp_path)
    assert len(packs) > 100 and {type(w) for w in packs} == {QuantWeight}
    packs.clear()
    assert answer("smollm2", tmp_path) == want and not packs


def test_dense_weights_are_kept_too(tmp_path: Path, packs: list[Any]) -> None:
    model = tiny_model(tmp_path / "model")
    want = answer(model, tmp_path / "cache", dtype="bfloat16")
    assert packs and all(isinstance(w, torch.Tensor) for w in packs)
    packs.clear()
    assert answer(model, tmp_path / "cache", dtype="bfloat16") == want and not packs


def test_other_weights_are_packed_anew(tmp_path: Path, packs: list[Any]) -> None:
    """Of the same shapes, at the same path: as after a download of another version."""
    model, other = tiny_model(tmp_path / "model"), tiny_model(tmp_path / "other", seed=1)
    cache = tmp_path / "cache"
    first = answer(model, cache)
    (weights,), (others,) = model.glob("*.safetensors"), other.glob("*.safetensors")
    shutil.copy(others, weights)
    os.utime(weights, ns=(1, 1))
    packs.clear()
    second = answer(model, cache)
    assert packs and second == answer(other, tmp_path / "apart") != first
    packs.clear()
    assert answer(model, cache) == second and not packs


def test_other_code_packs_anew(tmp_path: Path, packs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what lies before the packing: how weights are read and sliced."""
    model, cache = tiny_model(tmp_path / "model"), tmp_path / "cache"
    want = answer(model, cache)
    monkeypatch.setattr(packed, "package_digest", lambda: "another version")
    packs.clear()
    assert answer(model, cache) == want and packs


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def foreign(path: Path) -> None:
    path.write_bytes(b"no such thing")


def misshapen(path: Path) -> None:
    with packed.safe_open(path, framework="pt") as file:
        of = file.metadata()
    save_file({name: x[:, :-1].contiguous() for name, x in load_file(path).items()}, path, of)


@pytest.mark.parametrize("damage", [cut, foreign, misshapen])
def test_a_damaged_file_is_made_anew(damage: Callable[[Path], None], tmp_path: Path, packs: list[Any]) -> None:
    model, cache = tiny_model(tmp_path / "model"), tmp_path / "cache"
    want = answer(model, cache)
    damage(the_file(cache))
    packs.clear()
    assert answer(model, cache) == want and packs
    packs.clear()
    assert answer(model, cache) == want and not packs


def test_an_engine_starts_where_the_file_cannot_be_written(
    tmp_path: Path, packs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model, cache = tiny_model(tmp_path / "model"), tmp_path / "cache"
    monkeypatch.setattr(packed, "save_file", full)
    assert answer(model, cache) == answer(model, cache)
    assert not list(cache.glob("*/packed*"))


def test_small_models_leave_no_file(tmp_path: Path) -> None:
    answer(tiny_model(tmp_path / "model"), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/packed*"))
