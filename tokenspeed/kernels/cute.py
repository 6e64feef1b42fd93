"""Kernels of CuTe DSL, compiled ahead of time: `python -m tokenspeed.kernels.cute --out DIR [--json]`.

Invariant: the process that serves needs neither CuTe DSL nor its libraries. A kernel is a cubin, made for one architecture
and one set of constants, kept in a folder named by the source it was made from, and launched through the CUDA driver on
torch's current stream, so a captured graph holds it like any other. Where a cubin is missing and CuTe DSL is installed
(`pip install tokenspeed[cute]`), it is made on the spot.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = ("sm_90a", "sm_100a")
FOLDER_VARIABLE = "TOKENSPEED_CUTE_KERNELS"
ROOMS = (
    "norm.cute",
)  # modules that define kernels: each has BUILDS, name -> (build of (constants), constants to ship)
SHARED = 1024  # bytes of dynamic shared memory of every kernel here: one allocation, aligned to as much


class CuteError(RuntimeError):
    """A kernel that is neither in the folder nor can be made; says how to get it."""


@dataclass(frozen=True, slots=True)
class Build:
    """How a kernel is made: `function` gives, for its constants, a jit function and example arguments. `ships`: constants
    that `main` makes."""

    function: Callable[..., tuple[Any, tuple[Any, ...]]]
    ships: tuple[tuple[int, ...], ...]


def folder() -> Path:
    """Where cubins lie: of this source, under the variable's folder or the user's cache."""
    root = os.environ.get(FOLDER_VARIABLE) or "~/.cache/tokenspeed/cute"
    return Path(root).expanduser() / _source()


@functools.cache
def _source() -> str:
    here = Path(__file__).parent
    texts = [Path(__file__).read_bytes(), *((here / f"{m.replace('.', '/')}_kernels.py").read_bytes() for m in ROOMS)]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def file_of(name: str, constants: Sequence[int], arch: str) -> Path:
    return folder() / f"{'-'.join((name, *map(str, constants)))}.{arch}.cubin"


def build(name: str, constants: Sequence[int], arch: str) -> Path:
    """Makes a cubin, for an architecture that need not be here. CuteError without CuTe DSL."""
    path = file_of(name, constants, arch)
    if path.exists():
        return path
    try:
        import cutlass.cute as dsl  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise CuteError(
            f"{path} does not exist and CuTe DSL is not installed: `pip install 'tokenspeed[cute]'`, or make it elsewhere "
            f"with `python -m tokenspeed.kernels.cute --out DIR` and name DIR in {FOLDER_VARIABLE}"
        ) from None
    function, arguments = _builds()[name].function(*constants)
    with tempfile.TemporaryDirectory() as dump:
        asked = f"--gpu-arch {arch} --keep-cubin --dump-dir {dump}"
        code = dsl.compile(function, *arguments, options=asked).__cubin__
    if not code:
        raise CuteError(f"CuTe DSL gave no code for {path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}")
    staged.write_bytes(code)
    staged.replace(path)  # whole or not at all: another process may be reading it
    return path


def _builds() -> dict[str, Build]:
    out: dict[str, Build] = {}
    for room in ROOMS:
        out |= importlib.import_module(f"tokenspeed.kernels.{room}_kernels").BUILDS
    return out


# ---- launching -------------------------------------------------------------------------------------------------------


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(call: str, status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{call}: {(text.value or b'').decode()} ({status})")


@functools.cache
def _loaded(name: str, constants: tuple[int, ...], device: torch.device) -> ctypes.c_void_p:
    """The function of a kernel on a device; modules stay loaded as long as the process runs."""
    major, minor = torch.cuda.get_device_capability(device)
    code = build(name, constants, f"sm_{major}{minor}a").read_bytes()
    entry = re.search(rb"kernel_cutlass_\w+", code)
    if entry is None:
        raise CuteError(f"{file_of(name, constants, f'sm_{major}{minor}a')} holds no kernel")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the device's context is current from here on
        _checked("cuModuleLoadData", _driver().cuModuleLoadData(ctypes.byref(module), code))
        _checked("cuModuleGetFunction", _driver().cuModuleGetFunction(ctypes.byref(function), module, entry[0]))
    return function


def load(name: str, constants: tuple[int, ...], device: torch.device) -> None:
    """Has a kernel ready before a graph is captured."""
    _loaded(name, constants, device)


def launch(name: str, constants: tuple[int, ...], blocks: int, threads: int, *arguments: Tensor | float) -> None:
    """Runs a kernel over `blocks` on the current stream; arguments are addresses of tensors, and float32."""
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    function = _loaded(name, constants, device)
    held = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else ctypes.c_float(a) for a in arguments]
    packed = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    _checked(
        f"cuLaunchKernel of {name}",
        _driver().cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, SHARED, stream, packed, None),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Makes every kernel that ships for every architecture and reports registers and spilled bytes."""
    from tokenspeed.kernels.crosscompile import cubin_usage

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help=f"the folder to write to; empty: ${FOLDER_VARIABLE}, or the cache")
    parser.add_argument("--json", action="store_true", help="[{kernel, constants, target, bytes, registers, spilled}]")
    args = parser.parse_args(argv)
    if args.out:
        os.environ[FOLDER_VARIABLE] = args.out
    rows = []
    try:
        for name, how in _builds().items():
            for constants in how.ships:
                for arch in ARCHITECTURES:
                    code = build(name, constants, arch).read_bytes()
                    registers, spilled = cubin_usage(code)
                    rows.append({"kernel": name, "constants": list(constants), "target": arch, "bytes": len(code),
                                 "registers": registers, "spilled": spilled})  # fmt: skip
    except (CuteError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        for r in rows:
            print(
                f"{r['kernel']:14} {r['constants']!s:10} {r['target']:8} {r['registers']:4} registers {r['spilled']:4} spilled"
            )
        print(f"{len(rows)} kernels in {folder()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
