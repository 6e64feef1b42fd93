"""Storage of KV pages: what is read is what was written, whatever happens to it in between; and no fault leaves the store."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import tiny_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.runtime.errors import StartupError
from tokenspeed.runtime.kv.file_store import PAUSE, SHARES, FileStore
from tokenspeed.runtime.kv.record import HEADER_BYTES, Damaged, header, opened
from tokenspeed.runtime.kv.store import Address, Store, check_address, open_store, parse_address
from tokenspeed.runtime.outputs import RequestOutput

NAMESPACE, OTHER = b"n" * 16, b"m" * 16
SIZE = 512  # bytes of a page
LIMIT = 1 << 20


def key(i: int) -> bytes:
    return i.to_bytes(16, "little")


def page(i: int) -> bytes:
    return random.Random(i).randbytes(SIZE)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_record_of_which_any_bit_differs_is_refused() -> None:
    record = bytearray(header(NAMESPACE, key(1), page(1)) + page(1))
    assert opened(NAMESPACE, key(1), record, SIZE) == page(1)
    for bit in range(0, 8 * len(record), 3):
        record[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            opened(NAMESPACE, key(1), record, SIZE)
        record[bit // 8] ^= 1 << bit % 8
    for namespace, k, size in ((OTHER, key(1), SIZE), (NAMESPACE, key(2), SIZE), (NAMESPACE, key(1), SIZE - 1)):
        with pytest.raises(Damaged):
            opened(namespace, k, record, size)
    for cut in range(len(record)):
        with pytest.raises(Damaged):
            opened(NAMESPACE, key(1), record[:cut], SIZE)


Open = Callable[[bytes], Store]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis", reason="the Redis client is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    with subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            _await_port(port)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()


def _await_port(port: int) -> None:
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("redis-server does not listen")


@pytest.fixture(params=["file", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same storage again and again."""
    url = f"file://{tmp_path}?limit=1MiB" if request.param == "file" else request.getfixturevalue("redis_url")
    if request.param == "redis":
        import redis

        redis.Redis.from_url(url).flushall()
    return lambda namespace: open_store(parse_address(url), namespace, SIZE)


def test_what_was_written_is_read_by_the_next_store_of_the_namespace(stores: Open) -> None:
    first = stores(NAMESPACE)
    assert first.put([key(i) for i in range(5)], [page(i) for i in range(5)]) == [True] * 5
    assert first.tally.totals() | {"bytes_written": 0} == dict.fromkeys(first.tally.totals(), 0) | {"written": 5}
    first.close()
    again = stores(NAMESPACE)
    assert again.exists([key(4), key(5)]) == [True, False]
    assert [bytes(p) for p in again.get([key(i) for i in range(5)])] == [page(i) for i in range(5)]
    assert again.get([key(3), key(9), key(4)]) == [page(3)], "the leading ones"
    assert again.get([]) == []
    assert (again.tally.hits, again.tally.misses) == (6, 2)
    assert stores(OTHER).get([key(0)]) == []


def test_a_damaged_page_is_removed_counted_and_can_be_written_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path, NAMESPACE, SIZE, LIMIT)
    for number, spoil in enumerate(
        [
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            lambda path: path.write_bytes(b""),
            lambda path: path.write_bytes(path.read_bytes() + b"x"),
            lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
            lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 128])),
            lambda path: path.write_bytes(header(NAMESPACE, key(2), page(2)) + page(2)),
            lambda path: path.write_bytes(header(OTHER, key(1), page(1)) + page(1)),
        ]
    ):
        assert store.put([key(1)], [page(1)]) == [True]
        (path,) = files(tmp_path)
        spoil(path)
        assert store.get([key(1)]) == []
        assert store.tally.damaged == number + 1 and files(tmp_path) == []


def test_the_limit_is_kept_and_what_was_read_last_stays(tmp_path: Path) -> None:
    record = SIZE + HEADER_BYTES
    limit = 64 * record
    store = FileStore(tmp_path, NAMESPACE, SIZE, limit)
    for i in range(40):
        store.put([key(i)], [page(i)])
    for age, path in enumerate(reversed(files(tmp_path))):
        os.utime(path, (time.time() - 1000 - age,) * 2)
    assert store.get([key(0), key(1)]) == [page(0), page(1)]
    for i in range(40, 200):
        store.put([key(i)], [page(i)])
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
        store.get([key(0), key(1)])
    assert store.get([key(0), key(1)]) == [page(0), page(1)]
    assert store.exists([key(5)]) == [False] and store.exists([key(199)]) == [True]
    assert store.tally.removed >= 200 - 64
    with pytest.raises(StartupError, match=f"give at least {SHARES * record}"):
        FileStore(tmp_path, NAMESPACE, SIZE, SHARES * record - 1)


def test_what_others_keep_in_the_folder_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    limit = 64 * (SIZE + HEADER_BYTES)
    store = FileStore(tmp_path, NAMESPACE, SIZE, limit)
    store.put([key(0)], [page(0)])
    (mine,) = files(tmp_path)
    others = [
        tmp_path / "thesis.tex",
        tmp_path / "v1" / "notes",
        tmp_path / "thesis" / "v1" / "a",
        mine.with_name("b.tmp"),
    ]
    others += [
        tmp_path / "v1" / NAMESPACE.hex() / "zz" / key(1).hex(),
        tmp_path / "v1x" / NAMESPACE.hex() / "aa" / key(1).hex(),
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * limit)
        os.utime(path, (1e9, 1e9))
    elsewhere = tmp_path.parent / f"{tmp_path.name}-linked"
    (elsewhere / "ab").mkdir(parents=True)
    linked = elsewhere / "ab" / key(9).hex()
    linked.write_bytes(b"x" * limit)
    (tmp_path / "v1" / OTHER.hex()).symlink_to(elsewhere)
    for i in range(200):
        store.put([key(i)], [page(i)])
    assert all(path.read_bytes() == b"x" * limit for path in (*others, linked))
    assert sum(path.stat().st_size for path in files(tmp_path) if path not in others and path != linked) <= limit
    assert store.exists([key(199)]) == [True] and store.tally.removed >= 200 - 64


def test_temporary_files_of_a_dead_server_go(tmp_path: Path) -> None:
    store = FileStore(tmp_path, NAMESPACE, SIZE, LIMIT)
    store.put([key(1)], [page(1)])
    (path,) = files(tmp_path)
    old, new = path.with_name(f"{key(7).hex()}.1.1.tmp"), path.with_name(f"{key(8).hex()}.1.1.tmp")
    old.write_bytes(b"x"), new.write_bytes(b"x")
    os.utime(old, (time.time() - 10_000,) * 2)
    FileStore(tmp_path, NAMESPACE, SIZE, LIMIT).put([key(2)], [page(2)])
    assert not old.exists() and new.exists()


def test_a_folder_that_takes_nothing_fails_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, NAMESPACE, SIZE, LIMIT)
    assert store.put([key(1)], [page(1)]) == [True]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tokenspeed.runtime.kv.file_store.os.replace", full)
        assert store.put([key(2), key(3)], [page(2), page(3)]) == [False, False]
        assert store.tally.failures == 1, "it is left alone for a while"
        clock = time.monotonic() + PAUSE + 1
        patch.setattr("tokenspeed.runtime.kv.file_store.time.monotonic", lambda: clock)
        assert store.put([key(2)], [page(2)]) == [False] and store.tally.failures == 2
    assert len(files(tmp_path)) == 1, "nothing half-written stays"
    assert store.get([key(1)]) == [page(1)]
    shutil.rmtree(tmp_path)
    assert store.get([key(1)]) == [] and store.exists([key(1)]) == [False]
    with pytest.raises(StartupError, match="cannot make the folder"):
        (tmp_path.parent / "file").write_text("")
        FileStore(tmp_path.parent / "file" / "below", NAMESPACE, SIZE, LIMIT)


def write_for_ever(folder: str) -> None:
    store = FileStore(folder, NAMESPACE, SIZE, LIMIT)
    for i in itertools.count():
        store.put([key(i % 400)], [page(i % 400)])
        if i % 400 == 399:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_server_killed_while_it_writes_leaves_whole_pages(tmp_path: Path) -> None:
    store = FileStore(tmp_path, NAMESPACE, SIZE, LIMIT)
    context = mp.get_context("fork")
    for moment in range(8):
        process = context.Process(target=write_for_ever, args=(str(tmp_path),))
        process.start()
        time.sleep(0.01 * (moment + 1))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for i in range(400):
            assert store.get([key(i)]) in ([], [page(i)])
    assert store.tally.damaged == 0 and store.tally.hits > 0


def test_several_servers_write_read_and_remove_side_by_side(tmp_path: Path) -> None:
    limit = 100 * (SIZE + HEADER_BYTES)
    context = mp.get_context("fork")
    with context.Pool(3) as pool:
        counts = pool.starmap(use_together, [(str(tmp_path), limit, seed) for seed in range(3)])
    assert all(damaged == failures == 0 and hits > 0 for damaged, failures, hits in counts)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit * (1 + 2 / SHARES)


def use_together(folder: str, limit: int, seed: int) -> tuple[int, int, int]:
    store, rng = FileStore(folder, NAMESPACE, SIZE, limit), random.Random(seed)
    for _ in range(600):
        i = rng.randrange(200)
        if found := store.get([key(i)]):
            assert found == [page(i)]
        else:
            store.put([key(i)], [page(i)])
    return store.tally.damaged, store.tally.failures, store.tally.hits


def test_an_engine_finds_its_pages_in_redis_after_a_restart(redis_url: str, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {
        "model": str(model), "core": "inproc", "num_pages": 16, "page_size": 16, "max_num_seqs": 2, "max_model_len": 128,
        "buckets": [1, 2, 32], "max_num_batched_tokens": 32, "artifact_cache": str(tmp_path), "host_kv_gib": 0.001,
        "kv_storage": redis_url,
    }  # fmt: skip
    prompt = [random.Random(3).randrange(256) for _ in range(100)]
    outputs: list[RequestOutput] = []
    for _ in range(2):
        with Engine(**options) as engine:
            outputs.append(engine.generate(input_ids=prompt, sampling_params=params))
    first, again = outputs
    assert first.usage.cached_tokens == 0 and again.usage.cached_storage == 96
    assert first.token_ids == again.token_ids


def test_redis_damaged_full_and_away(redis_url: str) -> None:
    import redis

    client, store = redis.Redis.from_url(redis_url), open_store(parse_address(redis_url), OTHER, SIZE)
    client.flushall()
    assert store.put([key(1), key(2)], [page(1), page(2)]) == [True, True]
    (first, _) = sorted(client.keys())
    value = client.get(first)
    client.set(first, value[:-1] + bytes([value[-1] ^ 1]))
    assert store.get([key(1)]) + store.get([key(2)]) in ([page(1)], [page(2)])
    assert store.tally.damaged == 1 and len(client.keys()) == 1
    away = open_store(Address("redis", "redis://127.0.0.1:1/0", 0, 0.2), NAMESPACE, SIZE)
    assert away.get([key(1)]) == [] and away.put([key(1)], [page(1)]) == [False] and away.exists([key(1)]) == [False]
    assert away.tally.failures >= 1
    client.config_set("maxmemory", "1")
    try:
        assert store.put([key(3)], [page(3)]) == [False], "a full server"
    finally:
        client.config_set("maxmemory", "0")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", None),
        ("file:///var/kv?limit=100GiB", None),
        ("file:///var/kv?limit=1.5tb&timeout=2", None),
        ("redis://localhost:6379/1?timeout=0.5", None),
        ("rediss://user:secret@cache/0", None),
        ("/var/kv", "expected file:"),
        ("s3://bucket", "expected file:"),
        ("file:///var/kv", "needs a limit"),
        ("file://var/kv?limit=1GiB", "three slashes"),
        ("file:///?limit=1GiB", "three slashes"),
        ("file:///var/kv?limit=much", "limit is 'much'"),
        ("file:///var/kv?limit=0", "limit is '0'"),
        ("file:///var/kv?limit=1GiB&ttl=4", "takes limit and timeout, not ttl"),
        ("file:///..?limit=1GiB", "three slashes"),
        ("file:///a%00b?limit=1GiB", "no name holds a NUL"),
        ("file:///a#b?limit=1GiB", "written %23"),
        ("file:///a?limit=1GiB&limit=2GiB", "each setting is given once"),
        ("redis://h?limit=1GiB", "takes timeout, not limit"),
        ("redis://h?timeout=-1", "timeout is '-1'"),
        ("redis://h?timeout=soon", "timeout is 'soon'"),
        ("mooncake://m:50051?host=a", None),
        ("mooncake://m:50051?host=a&memory=16GiB&protocol=rdma&timeout=2", None),
        ("mooncake://m?host=a", "HOST:PORT"),
        ("mooncake://m:50051/0?host=a", "HOST:PORT"),
        ("mooncake://m:50051", "add host=NAME"),
        ("mooncake://m:50051?host=a&protocol=udp", "tcp or rdma"),
        ("mooncake://m:50051?host=a&memory=much", "memory is 'much'"),
        ("mooncake://m:50051?host=a&limit=1GiB", "takes host and memory and protocol and timeout, not limit"),
    ],
)
def test_addresses(text: str, fault: str | None) -> None:
    found = check_address(text)
    assert found is None if fault is None else found is not None and fault in found


def test_an_address_names_all_it_says() -> None:
    assert parse_address("file:///var/kv?limit=1.5KiB&timeout=2") == Address("file", "/var/kv", 1536, 2.0)
    assert parse_address("file:///var/k%20v%23/../x?limit=1KiB").location == "/var/x"
    assert parse_address("file:///k%20v%23?limit=1KiB").location == "/k v#"
    redis = parse_address("redis://u:secret@h:1/2?timeout=3")
    assert redis == Address("redis", "redis://u:secret@h:1/2", 0, 3.0) and redis.shown == "redis://h:1/2"
