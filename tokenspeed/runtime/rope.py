"""The tables of rotary position embedding, computed where weights are loaded. Invariant: one table an engine; what a request
computes does not depend on the lengths of others, nor on its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rope_table(attrs: Mapping[str, Any], length: int = 0) -> Tensor:
    """float32 [positions, dim]: cos of dim/2 angles, then sin.

    Angles are position * theta^(-2i/dim) (Su et al., 2104.09864); `linear` divides positions by `factor`; `divisors` holds
    one divisor a frequency (as GGUF files of Llama 3.x do); `llama3` divides
    low frequencies by `factor` and blends between `low_freq_factor` and `high_freq_factor` turns of the original context.
    `yarn` (2309.00071) blends over the frequencies that turn `beta_fast` to `beta_slow` times in it, and scales both halves.
    `longrope` (2402.13753) has a divisor a frequency for the original context and others for a longer one, which hold for all
    requests where `length`, the most tokens that one may have here, is beyond it. `dynamic` changes nothing within the model's
    positions, and none goes beyond them. The table depends on the configuration and `length` alone, never on a request.
    """
    dim, p, gain = int(attrs["dim"]), dict(attrs["parameters"]), 1.0
    inv = 1.0 / (float(p["rope_theta"]) ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if p["rope_type"] == "linear":
        inv = inv / float(p["factor"])
    elif p["rope_type"] == "divisors":
        inv = inv / torch.tensor(p["divisors"])
    elif p["rope_type"] == "llama3":
        old = float(p["original_max_position_embeddings"])
        low, high, factor = float(p["low_freq_factor"]), float(p["high_freq_factor"]), float(p["factor"])
        wavelength = 2 * math.pi / inv
        smooth = (old / wavelength - low) / (high - low)
        blended = (1 - smooth) * inv / factor + smooth * inv
        scaled = torch.where(wavelength > old / low, inv / factor, inv)
        between = (wavelength <= old / low) & (wavelength >= old / high)
        inv = torch.where(between, blended, scaled)
    elif p["rope_type"] == "longrope":
        old = int(p["original_max_position_embeddings"])
        inv, gain = (
            inv / torch.tensor(p["long_factor" if length > old else "short_factor"]),
            float(p["attention_factor"]),
        )
    elif p["rope_type"] == "yarn":
        inv, gain = _yarn(inv, p), float(p["attention_factor"])
    angle = torch.arange(int(attrs["positions"]), dtype=torch.float32)[:, None] * inv
    return torch.cat([angle.cos(), angle.sin()], dim=1) * gain


def _yarn(inv: Tensor, p: dict[str, Any]) -> Tensor:
    """Frequencies [dim/2]: those that turn often in the original context as they are, slow ones divided by `factor`."""
    dim, theta = 2 * len(inv), float(p["rope_theta"])

    def turning(times: float) -> float:
        """Index of the frequency that turns so often in the original context."""
        return dim * math.log(p["original_max_position_embeddings"] / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(p["beta_fast"]), turning(p["beta_slow"])
    if p["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return inv / float(p["factor"]) * slow + inv * (1 - slow)
