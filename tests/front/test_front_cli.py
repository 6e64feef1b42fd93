"""The command line: light, complete, and clear about what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import scripted_core
from rich.console import Console
from serving import AppServer

from tokenspeed import cli
from tokenspeed.cli import chat, env, serve
from tokenspeed.runtime import async_llm
from tokenspeed.runtime.messages import Ready
from tokenspeed.runtime.options import OptionError


def python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, env=environ)


def tokenspeed(*argv: str) -> subprocess.CompletedProcess[str]:
    return python("import sys; from tokenspeed.cli import main; sys.exit(main())", *argv)


HELP = """
import sys
from tokenspeed.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    print([name for name in sys.modules if name.startswith("tokenspeed.") or name in ("torch", "fastapi", "rich")])
"""


def test_help_names_every_command_and_imports_none() -> None:
    output = python(HELP, "--help").stdout
    for name, command in cli.COMMANDS.items():
        assert name in output and command.help in output
    assert output.endswith("['tokenspeed.cli']\n")


@pytest.mark.parametrize("command", ["chat", "env", "serve"])
def test_a_command_explains_itself_and_imports_nothing_heavy(command: str) -> None:
    output = python(HELP, command, "--help").stdout
    assert f"usage: tokenspeed {command}" in output
    imported = output.splitlines()[-1]
    assert f"tokenspeed.cli.{command}" in imported
    assert not any(name in imported for name in ("'torch'", "'fastapi'", "'rich'"))


def test_version_and_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"
    assert cli.main([]) == 0
    assert "usage: tokenspeed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["serve"], 2, "model is missing"),
        (["serve", "smollm2", "--dtype", "int3"], 2, "dtype is 'int3': expected one of"),
        (["serve", "smollm2", "--port", "x"], 2, "port is 'x': expected an integer"),
        (["serve", "/nowhere", "--port", "0"], 1, "/nowhere is no directory"),
        (["chat", "smollm2", "--url", "http://x/v1", "--dtype", "float32"], 2, "leave MODEL, --dtype out"),
        (["serve", "smollm2", "--max-model-len", "1"], 2, "max_model_len is 1: must be 0"),
        (["compile", "smollm2", "--max-model-len", "1", "-o", "/nowhere"], 2, "max_model_len is 1: must be 0"),
        (["chat", "--url", "ftp://x"], 2, "expected http://HOST:PORT/v1"),
    ],
)
def test_what_is_wrong_is_one_line(argv: list[str], status: int, says: str) -> None:
    result = tokenspeed(*argv, *(["--message", "x"] if argv[0] == "chat" else []))
    assert result.returncode == status and says in result.stderr and "Traceback" not in result.stderr


def test_an_unknown_flag_is_refused() -> None:
    result = tokenspeed("serve", "smollm2", "--no-such-flag")
    assert result.returncode == 2 and "--no-such-flag" in result.stderr


def test_env_tells_versions_and_settings_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_PAGE_SIZE", "64")
    monkeypatch.setenv("TOKENSPEED_API_KEY", "hush")
    monkeypatch.setenv("TOKENSPEED_ADMIN_KEY", "hush")
    facts = env.facts()
    assert (
        facts["TOKENSPEED_PAGE_SIZE"] == "64"
        and facts["TOKENSPEED_API_KEY"] == facts["TOKENSPEED_ADMIN_KEY"] == "(set)"
    )
    assert facts["python"] == sys.version.split()[0]
    assert facts["torch"] != "not installed" and "threads" in facts["cpu"] and facts["devices"]


def test_the_summary_shows_what_the_core_said() -> None:
    console = Console(record=True, width=100)
    ready = Ready(8192, 49152, 123_456, 256, {"ranks": 3, "buckets": "1, 2, 4"})
    console.print(serve._summary(ready, "http://h:1"))
    text = console.export_text()
    for part in ("http://h:1/v1", "ranks", "3", "buckets", "1, 2, 4"):
        assert part in text


# ---- chat ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def local_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm, "_engine_core", lambda: scripted_core.run_core)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    def typed() -> Iterator[str]:
        yield from lines
        raise EOFError

    source = typed()
    monkeypatch.setattr("builtins.input", lambda prompt: next(source))


BEGIN = "system\nYou are a helpful AI assistant"


@pytest.mark.usefixtures("local_core", "root_logger")
def test_chat_here(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["chat", "smollm2", "--core", "inproc", "--log-level", "error", "--message", "hi", "--max-tokens", "9"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == BEGIN + "\n"


def test_chat_with_a_server(server: AppServer, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "hello", "", "and then?")
    assert cli.main(["chat", "--url", server.url + "/v1", "--max-tokens", "5", "--system", "Be brief"]) == 0
    first, second = capsys.readouterr().out.strip().splitlines()[::2]
    assert first == second == "system"


def test_a_failed_turn_is_told_and_taken_back(server: AppServer, capsys: Any) -> None:
    messages: list[dict[str, str]] = []
    sampling = {"temperature": 0, "max_tokens": 10_000}
    assert chat._turn(messages, "x", lambda m: chat.ask_server(server.url + "/v1", "", m, sampling)) == 1
    assert messages == [] and "the context holds 512 tokens" in capsys.readouterr().err
    assert chat._turn(messages, "x", lambda m: chat.ask_server("http://127.0.0.1:1/v1", "", m, {})) == 1
    assert "cannot talk to http://127.0.0.1:1/v1" in capsys.readouterr().err


def test_a_fault_within_a_stream_is_told() -> None:
    with pytest.raises(Exception, match="broke"):
        chat._piece({"error": {"message": "it broke"}})


def test_wrong_url() -> None:
    with pytest.raises(OptionError, match="url is 'nowhere'"):
        next(chat.ask_server("nowhere", "", [], {}))
