"""docs/write-a-model.md is run as it is printed: files, commands and their output, the three mistakes, the server."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.processes import ROOT, Server, environment
from tests.e2e.tiny import save_model
from tokenspeed import Engine, SamplingParams
from tokenspeed.cli import main
from tokenspeed.runtime.compiling import compile_options
from tokenspeed.runtime.config import EngineConfig
from tokenspeed.runtime.errors import StartupError

PAGE = (ROOT / "docs" / "write-a-model.md").read_text("utf-8")


@dataclass(frozen=True)
class Fence:
    """One code block: the words behind its three backticks, and its text."""

    info: str
    text: str

    @property
    def file(self) -> str | None:
        found = re.search(r"file=(\S+)", self.info)
        return found[1] if found else None


FENCES = [Fence(m[1], m[2]) for m in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)]


def fences(info: str) -> list[Fence]:
    found = [f for f in FENCES if f.info == info]
    assert found, f"the page has no block {info!r}"
    return found


def check_output(printed: str, said: str) -> None:
    """The page's text must be what was said; `...` stands for anything."""
    pattern = re.escape(printed.rstrip()).replace(re.escape("..."), r"[\s\S]*")
    assert re.fullmatch(pattern, said.rstrip()), f"the page says\n{printed}\nthe command says\n{said}"


def said(command: list[str], folder: Path) -> str:
    """What a command of the command line prints when it is given in `folder`."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        assert main(command) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The author's directory with the page's files, compiled by the page's commands."""
    path = tmp_path_factory.mktemp("author")
    for fence in FENCES:
        if fence.file:
            (path / fence.file).write_text(fence.text)
    for fence in fences("console"):
        for command, printed in re.findall(r"^\$ tokenspeed (.*)\n((?:(?!\$ ).*\n)*)", fence.text, re.MULTILINE):
            check_output(printed, said(shlex.split(command), path))
    return path


@pytest.fixture(scope="module")
def tokens(folder: Path) -> list[int]:
    """What the page's program prints: tokens that one rank and two agree on."""
    (program,) = fences("python run")
    done = subprocess.run(
        [sys.executable, "-c", program.text], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_model_is_short_and_of_the_author_s_vocabulary(folder: Path) -> None:
    source = (folder / "parallel.py").read_text()
    assert len(source.splitlines()) <= 60
    assert set(re.findall(r"^(?:from|import) (\S+)", source, re.MULTILINE)) == {
        "typing",
        "torch",
        "tokenspeed.models.nn",
    }


def test_a_block_of_two_open_sums_is_reduced_once(folder: Path) -> None:
    printed = said(["explain", "tp2", "--bucket", "16", "--variant", "gumbel", "--json"], folder)
    (program,) = json.loads(printed)["programs"]
    rows = [row["edge"] for row in program["redistributions"]]
    assert sum(edge.startswith("blocks.") for edge in rows) == 4 and program["collectives"] == len(rows) == 6


def test_one_rank_and_two_give_the_same_tokens(tokens: list[int]) -> None:
    assert len(tokens) == 32 and len(set(tokens)) > 4


def test_it_is_served(folder: Path, tokens: list[int]) -> None:
    (block,) = fences("console serve")
    serve, curl = (shlex.split(line.removeprefix("$ ")) for line in block.text.splitlines())
    assert serve[:3] == ["tokenspeed", "serve", "tp2"]
    assert curl[2:5] == ["-H", "Content-Type: application/json", "-d"]
    with Server(folder / "tp2", "--num-pages", 64) as server:
        answer = (
            server.ready().post(re.sub(r"^http://[^/]+", "", curl[1]), json.loads(curl[5])).raise_for_status().json()
        )
    assert answer["choices"][0]["token_ids"] == tokens


MISTAKES = list(zip(fences("python replaces=FeedForward"), fences("text error"), strict=True))


@pytest.mark.parametrize("at", range(len(MISTAKES)))
def test_a_mistake_is_refused_as_printed(
    folder: Path, tmp_path: Path, at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake, error = MISTAKES[at]
    source = (folder / "parallel.py").read_text()
    changed = re.sub(r"class FeedForward[\s\S]*?(?=\n\n\nclass )", lambda _: mistake.text.rstrip(), source)
    assert changed != source
    (tmp_path / "parallel.py").write_text(changed)
    command = [
        "compile",
        f"{tmp_path}/parallel.py:Parallel",
        "--config",
        str(folder / "config.json"),
        "-o",
        str(tmp_path / "out"),
    ]
    assert main(command) == 1
    said = capsys.readouterr().err.replace(f"{tmp_path}/", "")
    assert said == f"tokenspeed compile: {error.text}"
    assert not (tmp_path / "out").exists()


def test_three_mistakes_are_shown() -> None:
    assert [error.text.split()[0] for _, error in MISTAKES] == ["P012", "P002", "P020"]


def test_a_table_of_names_reads_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """The page's `names`, put into the class: those tensors are asked for under their new names, the rest by path."""
    (table,) = (f for f in fences("python") if "def names" in f.text)
    source = (folder / "parallel.py").read_text()
    method = "".join(f"    {line}\n" if line else "\n" for line in table.text.splitlines())
    marker = "    @staticmethod\n    def dims"
    (tmp_path / "parallel.py").write_text(source.replace(marker, f"{method}\n{marker}"))
    found = _sources(tmp_path / "parallel.py", folder / "config.json")
    assert found["embed.w"] == [["model.embed_tokens.weight"]]
    assert found["head.w"] == [["lm_head.weight", "model.embed_tokens.weight"]]
    assert found["blocks.3.attn.qkv"] == [[f"model.layers.3.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert found["blocks.3.mlp.up"] == [["blocks.3.mlp.up.weight"]]


def _sources(file: Path, config: Path) -> dict[str, Any]:
    compiled = compile_options(EngineConfig(f"{file}:Parallel", config=str(config), buckets=[1]))
    return {e.name: [list(s.sources) for s in e.segments] for e in compiled.result.weights.entries}


def test_the_author_s_checkpoint_is_read(folder: Path, tmp_path: Path) -> None:
    """Weights beside the configuration are served; without any, the artifact says that it has none."""
    config = json.loads((folder / "config.json").read_text())
    model = {"model": f"{folder}/parallel.py:Parallel", "core": "inproc", "num_pages": 8, "buckets": [1, 8]}
    sources = _sources(folder / "parallel.py", folder / "config.json")
    shapes = {"h": 64, "f": 160, "q": 128, "kv": 32}
    g = torch.Generator().manual_seed(1)
    weights = {}
    for name, segments in sources.items():
        for (source,), rows in zip(segments, ["q", "kv", "kv"]):
            shape = {
                "w": (1003, 64), "qkv": (shapes[rows], 64), "o": (64, 128), "up": (160, 64), "down": (64, 160),
                "norm": (64,), "q_norm": (16,), "k_norm": (16,),
            }[name.rpartition(".")[2]]  # fmt: skip
            weights[source] = torch.randn(shape, generator=g)
    path = save_model(tmp_path / "model", config, weights, tokenizer=True)
    with Engine(**model, config=str(path)) as engine:
        out = engine.generate(
            input_ids=[5, 6], sampling_params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        )
        assert len(out.token_ids) == 4 and engine.tokenizer is not None
    with pytest.raises(StartupError, match="without weights"), Engine(**model, config=str(folder / "config.json")):
        pass
    (path / "other.json").write_text(json.dumps(config))
    with (
        pytest.raises(StartupError, match=r"other\.json does not belong to the weights"),
        Engine(**model, config=str(path / "other.json")),
    ):
        pass
