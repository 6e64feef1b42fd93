"""Golden texts: `check` compares with the stored file; TOKENSPEED_UPDATE_GOLDENS=1 writes it instead, to be reviewed."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).parent / "goldens"


def check(name: str, text: str) -> None:
    file = FOLDER / name
    if os.environ.get("TOKENSPEED_UPDATE_GOLDENS"):
        file.write_text(text, "utf-8")
    stored = file.read_text("utf-8")
    if text != stored:
        diff = "\n".join(difflib.unified_diff(stored.splitlines(), text.splitlines(), name, "now", lineterm="", n=1))
        raise AssertionError(f"{diff}\nreview it, then run again with TOKENSPEED_UPDATE_GOLDENS=1")
