"""The options of the engine and of the server: the one table (see options.py for what is generated from it).

Every field has an effect or is refused by name. An `EngineConfig` is plain data: it is pickled to the engine core
process and to worker ranks. Standard library only, so a core imports it on a machine without the serving extras.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from tokenspeed.runtime import options
from tokenspeed.runtime.kv.store import check_address
from tokenspeed.runtime.options import at_least, option
from tokenspeed.runtime.parsers import REASONING_ALIASES, REASONING_PARSERS, TOOL_ALIASES, TOOL_PARSERS

_ASSIGNMENTS = re.compile(r"[A-Za-z_]\w*=[\w*]+(,[A-Za-z_]\w*=[\w*]+)*")
_MESH = re.compile(r"[A-Za-z_]\w*=[1-9]\d*(,[A-Za-z_]\w*=[1-9]\d*)*")


def _mesh(value: str) -> str | None:
    if value and not _MESH.fullmatch(value):
        return "expected AXIS=SIZE pairs, as in tp=2,dp=1"
    names = [part.split("=")[0] for part in value.split(",")]
    return "an axis is given twice" if len(names) != len(set(names)) else None


def _axes(value: str) -> str | None:
    return None if not value or _ASSIGNMENTS.fullmatch(value) else "expected LOGICAL=MESH pairs, as in mlp=tp,vp=tp"


def _buckets(value: list[int]) -> str | None:
    ascending = all(low < high for low, high in itertools.pairwise(value))
    fits = all(0 < item <= 1 << 20 for item in value)
    return None if ascending and fits else "must be positive and ascending, up to 1048576 tokens"


def _model_len(value: int) -> str | None:
    return None if value == 0 or value >= 2 else "must be 0 (the model's own limit), or 2 and more (prompt and output)"


def _device(value: str) -> str | None:
    known = re.fullmatch(r"auto|cpu|cuda(?::(\d{2,3}))?", value)
    if known and known[1] is None:
        return None
    from tokenspeed.kernels.target import KNOWN  # with it comes torch, which a client of a server does without

    if known and int(known[1]) in KNOWN:
        return None
    return f"must be auto, cpu, cuda or cuda:ARCH, as in cuda:90, with one of the architectures {', '.join(map(str, KNOWN))}"


def _fraction(value: float) -> str | None:
    return None if 0.0 < value <= 1.0 else "must lie in (0, 1]"


@dataclass(slots=True)
class EngineConfig:
    """Engine options."""

    model: str = option(
        help="A checkpoint directory, a .gguf file, `smollm2` (the embedded model), an artifact directory, or "
        "`file.py:Class` with `--config`"
    )
    config: str = option(
        "", help="The config.json of a `file.py:Class` model, or of random weights (load_format dummy)"
    )
    tokenizer: str = option(
        "", help="Where the tokenizer is, if not with the model: a directory with tokenizer.json, a .gguf, `smollm2`"
    )
    chat_template: str = option("", help="A file with a Jinja chat template that replaces the model's own")
    load_format: str = option(
        "auto", choices=("auto", "dummy", "safetensors", "gguf"), help="The form of the weights; dummy: random ones"
    )
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16"), help="Arithmetic; auto: the model's own")
    kv_cache_dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="Storage of keys and values; auto: as dtype, bfloat16 for a quantised model",
    )
    device: str = option(
        "auto",
        check=_device,
        help="Where it runs: cpu, cuda, or to compile for a GPU that is not here cuda:90 (sm_90); "
        "auto: the GPU if there is one",
    )
    mesh: str = option("", check=_mesh, help="Ranks by axis, as in `tp=2,dp=1`")
    axes: str = option("", check=_axes, help="Logical axes on mesh axes, as in `mlp=tp,vp=tp`")
    tensor_parallel_size: int = option(
        1, check=at_least(1), aliases=("-tp", "--tp-size", "--tp"), help="Shorthand for `--mesh tp=N`"
    )
    max_model_len: int = option(
        0,
        check=_model_len,
        aliases=("--context-length",),
        help="Longest prompt plus output of a request, in tokens; 0: the model's own limit",
    )
    max_num_seqs: int = option(
        256,
        check=at_least(1),
        aliases=("--max-running-requests",),
        help="Requests that run at once in each data-parallel group",
    )
    max_num_batched_tokens: int = option(512, check=at_least(1), help="Tokens of one step in each data-parallel group")
    prefill_chunk: int = option(
        0,
        check=at_least(0),
        aliases=("--chunked-prefill-size",),
        help="Most prompt tokens of one request in one step; 0: the step's budget",
    )
    buckets: list[int] = option(  # noqa: RUF009 (it makes a field)
        list,
        check=_buckets,
        help="Token counts to compile programs for; none: 1, 2, 3, 4, 6, 8 and about eight steps an octave",
    )
    page_size: int = option(
        0,
        check=at_least(0),
        aliases=("--block-size",),
        help="Tokens in a page of the KV cache; 0: 16 on CPU, 64 on a GPU, which fetches pages whole",
    )
    num_pages: int = option(
        0,
        check=at_least(0),
        aliases=("--num-gpu-blocks-override",),
        help="Pages of the KV cache; 0: as many as memory_fraction holds",
    )
    memory_fraction: float = option(
        0.0,
        check=lambda value: _fraction(value) if value else None,
        aliases=("--gpu-memory-utilization", "--mem-fraction-static"),
        help="Share of the free memory to take: on CPU for the KV cache, on a GPU in all. 0: 0.3 on CPU, 0.92 on a GPU",
    )
    enable_prefix_caching: bool = option(True, help="Reuse the KV pages of a shared prompt prefix")
    host_kv_gib: float = option(
        0.0,
        check=at_least(0),
        aliases=("--kv-offloading-size",),
        help="GiB of host memory, over all ranks, for KV pages that the cache has no room for; 0: none",
    )
    kv_storage: str = option(
        "",
        check=check_address,
        help="Where KV pages outlive the server, behind the host memory: `file:///FOLDER?limit=100GiB`, "
        "`redis://HOST:PORT/0` or `mooncake://HOST:PORT?host=NAME`, each also with `timeout=SECONDS` (docs/kv-tiers.md)",
    )
    overlap_depth: int = option(
        1, choices=(0, 1), help="Steps planned and launched before the tokens of the last one are back; 0: synchronous"
    )
    threads: int = option(0, check=at_least(0), help="CPU threads of a rank's arithmetic; 0: cores over ranks")
    seed: int | None = option(
        None,
        aliases=("--random-seed",),
        help="Seed of random weights and of the seeds drawn for requests that name none; none: the system's",
    )
    decode_stall_tokens: int = option(
        0,
        check=at_least(0),
        help="Most prompt tokens in a step that also decodes, so that outputs do not stall; 0: the step's budget",
    )
    weights_socket: str = option(
        "",
        help="Unix socket on which a trainer sends other weights (tokenspeed.send_weights); none: there is no socket",
    )
    kv_events: int = option(
        0, check=at_least(0), help="Events of the prefix caches kept for routers (/internal/kv_events); 0: none"
    )
    max_queued_requests: int = option(
        2048, check=at_least(0), help="Requests accepted beyond those that can run; one more is a 429. 0: no bound"
    )
    max_queued_tokens: int = option(
        0, check=at_least(0), help="Prompt tokens accepted that wait for a first output token; 0: no bound"
    )
    queue_timeout: float = option(
        0.0,
        check=at_least(0),
        help="Seconds that an accepted request may wait for its first token; then it is a 503. 0: no limit",
    )
    request_timeout: float = option(
        0.0,
        check=at_least(0),
        help="Seconds that a request may take; then it ends as aborted, with what there is. Its own `timeout` may be "
        "shorter. 0: no limit",
    )
    core: str = option(
        "process", choices=("process", "inproc"), help="Where the engine core runs: its own process, or a thread here"
    )
    artifact_cache: str = option(
        "~/.cache/tokenspeed", help="Directory in which compiled artifacts and packed weights are kept and found again"
    )
    log_level: str = option("info", choices=("debug", "info", "warning", "error"), help="Least severity logged")

    def __post_init__(self) -> None:
        options.validate(self)
        if self.tensor_parallel_size > 1 and self.mesh:
            raise options.OptionError("tensor_parallel_size is shorthand for mesh tp=N: give one of them, not both")
        if ".py:" in self.model and not self.config:
            raise options.OptionError(f"model is {self.model!r}: a file.py:Class model needs config (--config FILE)")
        if self.kv_storage and not self.host_kv_gib:
            raise options.OptionError(
                "kv_storage needs host_kv_gib: pages go to storage and come back through host memory"
            )
        if self.host_kv_gib and not self.enable_prefix_caching:
            raise options.OptionError("host_kv_gib needs enable_prefix_caching: host memory keeps pages of prefixes")

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axis name -> ranks, in the order given; {'tp': 1} when nothing is given."""
        if not self.mesh:
            return {"tp": self.tensor_parallel_size}
        return {name: int(size) for name, _, size in (part.partition("=") for part in self.mesh.split(","))}


@dataclass(slots=True)
class ServerConfig:
    """Server options.

    They belong to `tokenspeed serve`; `Engine` has no use for them and refuses them.
    """

    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0: every interface")
    port: int = option(
        8000, check=lambda value: None if 0 <= value < 65536 else "must lie in 0..65535", help="Port; 0: a free one"
    )
    served_model_name: str = option(
        "",
        help="Names of the model in requests, as in NAME,ALIAS, the first one in answers; none: from the model's path",
    )
    api_key: str = option(
        "", help="Key that /v1 requests must bear (`Authorization: Bearer KEY` or `X-Api-Key: KEY`); none: open"
    )
    admin_key: str = option(
        "", help="Key of /internal, which control calls (abort, flush_cache) need; none: no control, the rest as /v1"
    )
    allowed_origins: str = option(
        "", help="Origins whose web pages may call the server (CORS), as in https://a.example,http://b; *: any"
    )
    response_store_mib: int = option(
        256, check=at_least(0), help="MiB of finished /v1/responses kept for previous_response_id; the oldest go first"
    )
    tool_call_parser: str = option(
        "auto",
        choices=("auto", "none", *TOOL_PARSERS, *TOOL_ALIASES),
        help="How the model writes calls of tools; auto: as its family (docs/parsers.md)",
    )
    reasoning_parser: str = option(
        "auto",
        choices=("auto", "none", *REASONING_PARSERS, *REASONING_ALIASES),
        help="How it marks its reasoning; auto: as its family",
    )
    drain_timeout: float = option(
        30.0, check=at_least(0), help="Seconds that requests in flight may take after SIGTERM before they are aborted"
    )
    max_body_bytes: int = option(
        64 << 20, check=at_least(1024, most=2**53), help="Longest request body; a longer one is a 413"
    )

    def __post_init__(self) -> None:
        options.validate(self)
