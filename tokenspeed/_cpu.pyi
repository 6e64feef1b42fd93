"""The C++ CPU kernels. Pointers are addresses (Tensor.data_ptr()), strides are in elements, dtypes are 0 (float32) or 1
(bfloat16), layouts are csrc/types.h Format. Nothing is checked here: use tokenspeed.kernels."""

def linear(
    x: int, ldx: int, x_dtype: int, w: int, layout: int, m: int, n: int, k: int, bias: int, bias_dtype: int, out: int,
    ldo: int, out_dtype: int, int8_activations: bool, /,
) -> None: ...  # fmt: skip
def lookup(
    ids: int, t: int, rows: int, width: int, offset: int, w: int, ldw: int, packed: bool, layout: int, out: int,
    ldo: int,
    out_dtype: int, /,
) -> None: ...  # fmt: skip
def norm(
    x: int, xo: int, xi: int, y: int, yo: int, w: int, w_dtype: int, sum: int, so: int, out: int, oo: int, oi: int,
    outer: int, inner: int, d: int, eps: float, dtype: int, /,
) -> None: ...  # fmt: skip
def rope(
    x: int, xt: int, xn: int, pos: int, table: int, ldt: int, out: int, ot: int, on: int, t: int, n: int, d: int,
    r: int,
    dtype: int, /,
) -> None: ...  # fmt: skip
def pointwise(
    kind: int, a: int, lda: int, b: int, ldb: int, out: int, ldo: int, rows: int, width: int, factor: float,
    dtype: int, /,
) -> None: ...  # fmt: skip
def append(
    k: int, kt: int, kh: int, v: int, vt: int, vh: int, slot: int, kcache: int, vcache: int, cs: int, ch: int, t: int,
    kv: int, d: int, slots: int, dtype: int, cache_dtype: int, /,
) -> None: ...  # fmt: skip
def attend(
    q: int, qt: int, qn: int, kcache: int, vcache: int, cs: int, ch: int, pos: int, row: int, table: int, ldt: int,
    out: int, ot: int, on: int, t: int, n: int, kv: int, d: int, page: int, scale: float, window: int,
    softcap: float, sinks: int, sinks_dtype: int, dtype: int, cache_dtype: int, /,
) -> None: ...  # fmt: skip
def conv(
    pos: int, row: int, state: int, t: int, states: int, x: int, xt: int, xn: int, w: int, w_dtype: int, past: int,
    out: int, ot: int, on: int, n: int, d: int, taps: int, dtype: int, /,
) -> None: ...  # fmt: skip
def delta(
    pos: int, row: int, state: int, t: int, states: int, q: int, qt: int, qn: int, k: int, kt: int, kn: int, v: int,
    vt: int, vn: int, decay: int, gt: int, beta: int, bt: int, memory: int, out: int, ot: int, on: int, hk: int,
    hv: int, dk: int, dv: int, scale: float, dtype: int, /,
) -> None: ...  # fmt: skip
def decay(x: int, xt: int, a: int, dt: int, out: int, ot: int, t: int, n: int, dtype: int, /) -> None: ...
def l2_norm(
    x: int, xt: int, xn: int, out: int, ot: int, on: int, t: int, n: int, d: int, eps: float, dtype: int, /
) -> None: ...
def gated_norm(
    x: int, xt: int, xn: int, z: int, zt: int, zn: int, w: int, w_dtype: int, out: int, ot: int, on: int, t: int,
    n: int, d: int, eps: float, dtype: int, /,
) -> None: ...  # fmt: skip
def logits(
    z: int, ldz: int, params: int, out: int, ldo: int, value: int, index: int, s: int, v: int, offset: int,
    temper: bool,
    gumbel: bool, /,
) -> None: ...  # fmt: skip
def sample(
    z: int, ldz: int, params: int, counts: int, ldc: int, seen: int, lds: int, bias: int, ldb: int, rows: int,
    token: int,
    logprob: int, top_ids: int, top_logprobs: int, s: int, vocab: int, /,
) -> None: ...  # fmt: skip
def advise_huge_pages(data: int, bytes: int, /) -> bool:
    """Asks for huge pages behind page-aligned memory; True if the kernel took the advice."""

def read_sum(data: int, bytes: int, /) -> int:
    """Sum of the 32-bit words of `bytes` (rounded down to 64) at `data`, by every thread: memory at full speed."""

class Program:
    """Recorded kernel calls; see tokenspeed.kernels.capture."""

    def run(self) -> None: ...
    def __len__(self) -> int: ...

def begin_capture() -> None:
    """From here on this thread's kernel calls are recorded and not run; RuntimeError if it already captures."""

def end_capture() -> Program:
    """What was recorded since begin_capture; RuntimeError if this thread does not capture."""

def tile_bytes(layout: int, blocks: int, /) -> int:
    """Bytes of one packed tile of 16 rows and 32 * blocks columns."""

def threads() -> int:
    """Threads that take part in a call, the caller included."""

def set_threads(threads: int) -> None:
    """Resizes the pool; 0: the processors in the affinity mask. ValueError outside 0..1024."""

def available_threads() -> int:
    """Processors in this process's affinity mask."""

def source_hash() -> str:
    """A hash of the C++ sources of this build."""

def isa() -> str:
    """The instruction set in use."""

def supported_isas() -> list[str]:
    """What this machine supports, slowest first."""

def set_isa(name: str) -> None:
    """Uses one of `supported_isas()`; ValueError otherwise."""
