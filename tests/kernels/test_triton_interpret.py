"""Runs the triton_*_cases.py here under Triton's interpreter, in a process of
its own: the choice between interpreter and compiler
is made when Triton is imported, and test_triton_compile.py needs the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("triton")


@pytest.mark.timeout(480)
def test_kernels_against_references_in_the_interpreter() -> None:
    cases = [f"tests/kernels/{name}.py" for name in ("triton_cases", "triton_fused_cases", "triton_engine_cases")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *cases]
    # Tokens in bfloat16 are compared with the CPU's: in plain float arithmetic, on every machine.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TOKENSPEED_CPU_ISA": "portable"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=460)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
