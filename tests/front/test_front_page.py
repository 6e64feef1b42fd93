"""The web page: its files and what they may load, the metrics it reads, and both its halves in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import scripted_core
from browser import Browser, find
from serving import AppServer

from tokenspeed.runtime.config import ServerConfig
from tokenspeed.runtime.messages import Stats
from tokenspeed.runtime.metrics import Metrics
from tokenspeed.runtime.server import page

FILES = Path(page.__file__).parent
THOUGHT, TEXT = "Let me see.", 'No <b>bold</b> & no "quotes": <script>alert(1)</script> 😀'


@pytest.fixture(scope="module")
def server() -> Iterator[AppServer]:
    config = ServerConfig(reasoning_parser="qwen3", api_key="secret")
    with AppServer(scripted_core.run_player, config, max_model_len=4096) as server:
        yield server


def test_the_page_loads_nothing_but_its_own_files(server: AppServer) -> None:
    response = httpx.get(server.url + "/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    linked = set(re.findall(r'(?:src|href)="([^"]+)"', response.text)) - {"data:,"}
    assert linked == {f"/page/{name}" for name in page.FILES}
    for path in linked:
        file = httpx.get(server.url + path)
        assert file.status_code == 200 and file.headers["content-type"].startswith("text/")
        assert "http:" not in file.text and "https:" not in file.text and "innerHTML" not in file.text
    for path in ("/page/__init__.py", "/page/../app.py", "/page/x"):
        assert httpx.get(server.url + path).status_code == 404


def test_every_figure_of_the_page_is_a_metric() -> None:
    metrics = Metrics("m")
    metrics.finished("stop", 1, 0.1)
    tiers = Stats(
        page_bytes=1,
        host={"total": 2, "free": 1},
        hit_tokens={"device": 1},
        storage={"bytes_read": 1},
        transfers={},
    )
    metrics.step(Stats(), tiers)
    known = set(re.findall(r"^tokenspeed:(\w+)", metrics.render().decode(), re.MULTILINE))
    script = (FILES / "live.js").read_text("utf-8")
    named = set(re.findall(r'(?:total|rows|grew|perSecond)\([^"()]*"(\w+)"', script))
    histograms = set(re.findall(r'\["\w+", "(\w+_seconds)"\]', script))
    assert len(named) > 10 and len(histograms) == 3
    assert named <= known and {f"{name}_bucket" for name in histograms} <= known


def test_every_element_that_a_script_names_is_in_the_page() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', (FILES / "index.html").read_text("utf-8")))
    for name in ("live.js", "chat.js"):
        script = (FILES / name).read_text("utf-8")
        named = set(re.findall(r'(?:show|get|getElementById)\("([\w-]+)"', script))
        assert named and named <= ids


@pytest.fixture(scope="module")
def browser(server: AppServer) -> Iterator[Browser]:
    path = find()
    if path is None:
        pytest.skip("no Chromium is installed (TOKENSPEED_CHROMIUM names one)")
    browser = Browser(path)
    yield browser
    browser.close()


def test_a_chat_in_a_browser(server: AppServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("document.getElementById('health').textContent === 'ready'")
    browser.run("document.getElementById('key').value = 'secret'")
    for said in ("hi", "and again"):
        server.play(f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}")
        browser.run(f"document.getElementById('say').value = {said!r}; document.getElementById('ask').requestSubmit()")
        browser.wait("document.getElementById('stop').hidden && document.querySelectorAll('.turn .note').length")
        assert browser.run("[...document.querySelectorAll('.turn.assistant .thought')].at(-1).textContent") == THOUGHT
        assert browser.run("[...document.querySelectorAll('.turn.assistant .said')].at(-1).textContent") == TEXT
        assert "ended: stop" in browser.run("[...document.querySelectorAll('.note')].at(-1).textContent")
        browser.wait("document.activeElement.id === 'say'")
    assert browser.run("document.querySelectorAll('.turn.user').length") == 2
    assert browser.run("document.querySelector('#talk b, #talk script')") is None
    assert browser.run("document.getElementById('model').textContent") == "smollm2"
    assert [error for error in browser.errors if "401" not in error] == []  # before the key was there


def test_a_wrong_key_is_told_and_nothing_is_kept_of_the_message(server: AppServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("document.getElementById('health').textContent === 'ready'")
    browser.run("document.getElementById('say').value = 'hi'; document.getElementById('ask').requestSubmit()")
    assert "key" in browser.wait("document.querySelector('.turn.fault')?.textContent")
    assert browser.run("document.getElementById('send').disabled") is False


def test_an_answer_is_stopped_in_a_browser(server: AppServer, browser: Browser) -> None:
    browser.open(server.url)
    browser.wait("document.getElementById('health').textContent === 'ready'")
    browser.run("document.getElementById('key').value = 'secret'")
    scripted_core.PLAYS.append([scripted_core.SLOW] * 3000)
    browser.run("document.getElementById('say').value = 'hi'; document.getElementById('ask').requestSubmit()")
    browser.wait("document.querySelector('.turn.assistant .said')?.textContent.length > 5")
    browser.run("document.getElementById('stop').click()")
    browser.wait("document.getElementById('stop').hidden")
    assert browser.run("document.querySelector('.turn.fault')") is None
    browser.run("document.getElementById('clear').click()")
    assert browser.run("document.querySelectorAll('.turn').length") == 0


def test_the_live_view_shows_what_the_engine_does(server: AppServer, browser: Browser) -> None:
    browser.open(server.url)
    for _ in range(2):
        body = {"model": "smollm2", "prompt": [5, 6, 7], "max_tokens": 50}
        assert server.post("/v1/completions", body, headers={"Authorization": "Bearer secret"}).status_code == 200
    browser.wait("document.getElementById('ended').textContent.includes('length')")
    browser.wait("document.getElementById('running').textContent === '0'")
    browser.wait("document.querySelector('#spark polyline').getAttribute('points').includes(' ')")
    assert browser.run("document.getElementById('device-text').textContent").endswith("held by requests")
    found = browser.run(
        "import('/page/live.js').then(({parse, quantile}) => {"
        'const at = (a, b, c) => ({values: parse(`tokenspeed:x_bucket{le="1.0",model_name="m"} ${a}\\n'
        'tokenspeed:x_bucket{le="2.0",model_name="m"} ${b}\\ntokenspeed:x_bucket{le="+Inf",model_name="m"} ${c}\\n`)});'
        "return [quantile(at(0, 0, 0), at(10, 20, 20), 'x', 0.5), quantile(at(0, 0, 0), at(0, 4, 4), 'x', 0.25),"
        "quantile(at(1, 1, 1), at(1, 1, 1), 'x', 0.5), quantile(at(0, 0, 0), at(0, 0, 3), 'x', 0.5)]})"
    )
    assert found == [1, 1.25, None, 2]
