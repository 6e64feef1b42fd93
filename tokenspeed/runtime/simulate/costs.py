"""How long a step and a transfer take on the machine that is simulated. A step is a roofline: the larger of the bytes it moves
over the memory's bandwidth and the arithmetic it does over the processor's, and a fixed part. Seconds throughout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One rank, or several that work as one; figures as they are reached, not as they are sold. The defaults are those of
    Llama-3.1-8B in bf16 on one H200 (the calibration table `h200`)."""

    memory_gbs: float = 4000.0
    tflops: float = 600.0
    step_ms: float = 0.3  # of every step: launches and the host's part that nothing hides
    weight_gb: float = 16.0  # read by every step
    active_billion: float = 8.0  # parameters that a token meets
    kv_bytes: int = 131_072  # of a token
    attention_flops: float = 524_288.0  # of a token for each token of its context: 4 * layers * heads * head size
    host_gbs: float = 50.0  # between device and host memory, each way
    storage_gbs: float = 4.0  # each way
    storage_ms: float = 0.5  # before the first byte

    def step(self, rows: Iterable[tuple[int, int]]) -> float:
        """`rows`: (tokens of the step, context they end in) of each request."""
        tokens = context = attended = 0
        for n, end in rows:
            tokens += n
            context += end
            attended += n * (end - n // 2)
        moved = self.weight_gb * 1e9 + (context + tokens) * self.kv_bytes
        made = tokens * 2e9 * self.active_billion + attended * self.attention_flops
        return self.step_ms * 1e-3 + max(moved / (self.memory_gbs * 1e9), made / (self.tflops * 1e12))

    def transfer(self, kind: str, pages: int, page_bytes: int) -> float:
        """Seconds of a transfer that has its lane for itself."""
        if kind in ("write_back", "load_back"):
            return 20e-6 + pages * page_bytes / (self.host_gbs * 1e9)
        return self.storage_ms * 1e-3 + pages * page_bytes / (self.storage_gbs * 1e9)

    def alone(self, cached: int, prompt: int, output: int, chunk: int) -> float:
        """Seconds of a request that has the machine for itself and finds `cached` tokens of its prompt."""
        took, at = 0.0, cached
        while at < prompt:
            n = min(chunk, prompt - at)
            took += self.step([(n, at + n)])
            at += n
        return took + (output - 1) * self.step([(1, prompt + output // 2)])
