"""What tells whether something made from files would be made alike again: the state of a file, and of this package's code."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_READ_WHOLE = 1 << 20  # bytes: a configuration is compared by its text, weights by their size and time of change


def file_state(path: Path) -> str:
    """A file's place, and its text, or its size and time of change where it is large."""
    try:
        stat = path.stat()
        text = path.read_bytes().hex() if stat.st_size <= _READ_WHOLE else ""
    except OSError:
        return f"{path}: not there"
    return f"{path.resolve()} {stat.st_size} {text or stat.st_mtime_ns}"


@functools.cache
def package_digest() -> str:
    """A digest of this package's files, once a process."""
    found = hashlib.sha256()
    for path in sorted(p for p in _PACKAGE.rglob("*") if p.suffix in (".py", ".json")):
        found.update(f"\n{path.relative_to(_PACKAGE)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
