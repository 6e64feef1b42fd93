"""What all tests share."""

from __future__ import annotations

import os

# Kernel choices that were measured on this machine are none of the tests' business.
os.environ["TOKENSPEED_KERNEL_TABLES"] = os.devnull
