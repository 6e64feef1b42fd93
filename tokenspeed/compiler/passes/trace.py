"""Pass 1 and 2: run the author's modules on proxies, extract leaves, flatten composites into one list.

Invariant after: a flat list of glue ops and leaf calls in program order, values named by module path; every leaf body is
normalised (gated activations fused), its parameters are named relative to its module, and equal bodies share one entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenspeed.ir.builder import CallNode, Frame, Proxy, Trace, tracing
from tokenspeed.ir.errors import Origin, PlacementError
from tokenspeed.ir.graph import Node
from tokenspeed.ir.spec import Spec
from tokenspeed.ir.types import ROW_DIMS
from tokenspeed.models.nn.config import Config
from tokenspeed.models.nn.maps import Linear, Weight
from tokenspeed.models.nn.module import Module, name_tree
from tokenspeed.models.nn.params import PagedAttention

#: a declaration of a parameter: Linear, Weight, RMSNorm, Rope, PagedAttention, SamplingState
Decl = Any


@dataclass(eq=False)
class LeafDef:
    """One leaf body before any placement: names local, parameters relative ("/x" where another module owns them)."""

    kind: str
    nodes: list[Node]
    in_names: list[str]
    in_specs: list[Spec]
    out_names: list[str]
    out_specs: list[Spec]
    decls: dict[str, Decl]
    origin: Origin
    first_path: str


@dataclass
class FlatNode:
    """A glue op (leaf None) or a leaf call. `spec` on a cross node is the signature that constrains it."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any]
    origin: Origin
    leaf: LeafDef | None = None
    path: str = ""
    spec: Spec | None = None

    @property
    def name(self) -> str:
        return self.path or (self.outputs[0] if self.outputs else self.op)


@dataclass
class Flat:
    """The whole model as one list."""

    name: str
    variant: str
    ports: dict[str, tuple[Spec, str]]  # name -> placement, dtype
    results: list[tuple[str, Spec]]
    nodes: list[FlatNode]
    decls: dict[str, Decl]  # absolute name -> declaration, of glue ops and leaves
    leaves: list[LeafDef]
    dims: dict[str, int]
    per_request: dict[str, int] = field(default_factory=dict)  # row dim -> rows a request
    exports: list[str] = field(default_factory=list)  # names of results after the first, in order

    @cached_property
    def uses(self) -> dict[str, tuple[tuple[int, int], list[tuple[int, int]]]]:
        """Of each value that somebody takes, in order of first use: (node, result) that makes it, (-1, 0) for a port; and (node,
        operand) of each consumer, (-1, k) for result k of the program."""
        makers = {o: (i, k) for i, n in enumerate(self.nodes) for k, o in enumerate(n.outputs)}
        uses: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for i, n in enumerate(self.nodes):
            for k, v in enumerate(v for v in n.inputs if not v.startswith("@")):
                uses[v].append((i, k))
        for k, (v, _) in enumerate(self.results):
            uses[v].append((-1, k))
        return {name: (makers.get(name, (-1, 0)), consumers) for name, consumers in uses.items()}

    def consumer_name(self, i: int) -> str:
        """How edges into flat node i are named: a module's path, what an op makes, or `result` for -1."""
        return "result" if i < 0 else self.nodes[i].name


def trace_model(
    cls: type[Module], config: Config, variant: str, sharded: bool = False, tag: Callable[[str], str] = lambda _: ""
) -> Flat:
    """Builds the model, traces it and flattens it. `sharded`: whether the plan shards the vocabulary beside the home axes;
    `tag(path)` distinguishes leaves whose weights are stored differently."""
    model = cls(config)  # type: ignore[call-arg]
    return flatten(model, cls.dims(config), variant, sharded, tag)  # type: ignore[attr-defined]


def flatten(
    model: Module, dims: dict[str, int], variant: str, sharded: bool = False, tag: Callable[[str], str] = lambda _: ""
) -> Flat:
    name_tree(model)
    sig = model.signature()
    ports: dict[str, tuple[Spec, str]] = {}
    args: list[Any] = []
    for name, spec in sig.args:
        if isinstance(spec, Spec):
            raise PlacementError(
                "P004", f"{sig.origin}: the root module takes one struct of ports, {name!r} is a tensor"
            )
        ports.update({k: (p.spec, p.dtype) for k, p in spec.fields().items()})
        args.append(spec({k: Proxy(k, sig.origin) for k in spec.fields()}))
    trace = Trace(variant, sharded)
    root = Frame("", type(model).__name__, origin=sig.origin)
    root.in_names = list(ports)
    with tracing(trace):
        trace.frames.append(root)
        out = model.forward(*args)
    if not isinstance(out, Proxy):
        raise PlacementError("P004", f"{sig.origin}: the root module returns one tensor of sampled tokens")
    root.out_names = [out.name]
    static, rows = ({d: n for d, n in dims.items() if (d in ROW_DIMS) == per} for per in (False, True))
    flat = Flat(type(model).__name__, variant, ports, [], [], {}, [], static, rows)
    env = _Flattener(flat, tag).run(root, {p: p for p in ports})
    read = {name for node in flat.nodes for name in node.inputs}
    optional = {k for _, spec in sig.args if not isinstance(spec, Spec) for k, p in spec.fields().items() if p.optional}
    flat.ports = {name: port for name, port in ports.items() if name in read or name not in optional}
    first_out: Spec = sig.outs[0]
    flat.results = [(env[out.name], first_out)] + [(env[v], spec) for v, spec in trace.exports.values()]
    flat.exports = list(trace.exports)
    return flat


class _Flattener:
    def __init__(self, flat: Flat, tag: Callable[[str], str]) -> None:
        self.flat, self.tag = flat, tag
        self.known: dict[Any, LeafDef] = {}
        self.used: dict[str, int] = {}

    def name(self, base: str) -> str:
        n = self.used[base] = self.used.get(base, -1) + 1
        return base if n == 0 else f"{base}.{n}"

    def run(self, frame: Frame, env: dict[str, str]) -> dict[str, str]:
        """Appends the nodes of a composite; `env` maps its local values to program values."""
        self.flat.decls.update(frame.params)
        for node in frame.nodes:
            if isinstance(node, CallNode):
                self.call(node, env)
            else:
                params = [i[1:].split(":")[0] for i in node.inputs if i.startswith("@")]
                base = params[0] if params else f"{frame.path}.{node.op}" if frame.path else node.op
                outs = [self.name(base) for _ in node.outputs]
                ins = [i if i.startswith("@") else env[i] for i in node.inputs]
                self.flat.nodes.append(FlatNode(node.op, ins, outs, node.attrs, node.origin))
                env.update(zip(node.outputs, outs))
        return env

    def call(self, node: CallNode, env: dict[str, str]) -> None:
        frame = node.frame
        ins = [env[i] for i in node.inputs]
        if not frame.composite:
            leaf = self.leaf(frame)
            ins = [v for n, v in zip(frame.in_names, ins) if n in leaf.in_names]
            outs = [self.name(frame.path) for _ in node.outputs]
            flat_node = FlatNode("call", ins, outs, {}, node.origin, leaf, frame.path)
            self.flat.nodes.append(flat_node)
            self.flat.decls.update(frame.params)
        else:
            inner = {
                n: self.cross(v, s, frame.path, node.origin) for n, v, s in zip(frame.in_names, ins, frame.in_specs)
            }
            self.run(frame, inner)
            outs = [self.cross(inner[n], s, frame.path, node.origin) for n, s in zip(frame.out_names, frame.out_specs)]
        env.update(zip(node.outputs, outs))

    def cross(self, value: str, spec: Spec | None, path: str, origin: Origin) -> str:
        """A composite's signature constrains what crosses it; a vacuous one (every row dim starred, `+?`) adds nothing."""
        if (
            spec is None
            or value in self.flat.ports
            or (spec.any_pending and all(d.starred or not d.factors[0].axes for d in spec.dims))
        ):
            return value
        out = self.name(f"{path}.cross")
        self.flat.nodes.append(FlatNode("cross", [value], [out], {}, origin, spec=spec))
        return out

    def leaf(self, frame: Frame) -> LeafDef:
        rel = {p: p[len(frame.path) + 1 :] if p.startswith(frame.path + ".") else "/" + p for p in frame.params}
        nodes, key = _localise(frame, rel)
        full = (frame.kind, key, tuple(frame.in_names), tuple(map(str, frame.in_specs)), tuple(map(str, frame.out_specs)),
                tuple((rel[p], _decl_key(d), self.tag(p)) for p, d in frame.params.items()))  # fmt: skip
        if full not in self.known:
            local = _local_names(frame)
            outs = [local[n] for n in frame.out_names]
            read = {i for n in nodes for i in n.inputs} | set(outs)
            used = [(n, s) for n, s in zip(frame.in_names, frame.in_specs) if n in read and s is not None]
            leaf = LeafDef(frame.kind, nodes, [n for n, _ in used], [s for _, s in used], outs, frame.out_specs,
                           {rel[p]: d for p, d in frame.params.items()}, frame.origin, frame.path)  # fmt: skip
            self.known[full] = leaf
            self.flat.leaves.append(leaf)
        return self.known[full]


def _local_names(frame: Frame) -> dict[str, str]:
    """Value names of a leaf: its arguments keep theirs, the others are numbered in program order."""
    names = {n: n for n in frame.in_names}
    outs = [o for node in frame.nodes for o in node.outputs]
    return names | {o: str(i) for i, o in enumerate(outs)}


def _localise(frame: Frame, rel: dict[str, str]) -> tuple[list[Node], Any]:
    """The frame's nodes with local value names ("0", "1" ...) and relative parameter names, and a hashable key of them."""
    names = _local_names(frame)

    def ref(i: str) -> str:
        if not i.startswith("@"):
            return names[i]
        base, colon, seg = i[1:].partition(":")
        if base not in rel and base.endswith(".bias") and base[:-5] in rel:
            return f"@{rel[base[:-5]]}.bias{colon}{seg}"
        return f"@{rel[base]}{colon}{seg}"

    nodes = [
        Node(n.op, tuple(map(ref, n.inputs)), tuple(names[o] for o in n.outputs), n.attrs, n.origin)
        for n in frame.nodes
        if isinstance(n, Node)
    ]
    nodes = _fuse_gates(nodes)
    key = tuple((n.op, n.inputs, n.outputs, tuple(sorted((k, str(v)) for k, v in n.attrs.items()))) for n in nodes)
    return nodes, key


_GATES = {"silu": "silu_mul", "gelu": "gelu_mul"}


def _fuse_gates(nodes: list[Node]) -> list[Node]:
    """silu(a) * b -> silu_mul(a, b), and gelu alike, where the activation has no other use."""
    uses: dict[str, int] = {}
    for n in nodes:
        for i in n.inputs:
            uses[i] = uses.get(i, 0) + 1
    made = {n.outputs[0]: n for n in nodes if n.op in _GATES}
    out: list[Node] = []
    dropped: set[str] = set()
    for n in nodes:
        if n.op == "mul" and n.inputs[0] in made and uses[n.inputs[0]] == 1:
            gate = made[n.inputs[0]]
            dropped.add(n.inputs[0])
            n = Node(_GATES[gate.op], (gate.inputs[0], n.inputs[1]), n.outputs, {}, n.origin)
        out.append(n)
    return [n for n in out if not (n.op in _GATES and n.outputs[0] in dropped)]


def _decl_key(decl: Decl) -> Any:
    if isinstance(decl, Linear):
        return ("linear", decl.text, tuple(map(str, decl.bias or ())), decl.dtype)
    if isinstance(decl, Weight):
        return ("weight", str(decl.spec), decl.pad, decl.dtype)
    if isinstance(decl, PagedAttention):
        return ("attention", str(decl.n), str(decl.kv), str(decl.d), decl.scale)
    return (type(decl).__name__, tuple(sorted((k, str(v)) for k, v in vars(decl).items() if k != "path")))
