"""Modules: the unit of annotation. A signature says how tensors are placed when they come in and when they go out.

Invariant: a body holds no rank, no group, no collective and no size arithmetic on ranks; calling an annotated module
records a call, calling an op-with-weights (Linear, RMSNorm, PagedAttention ...) records an op.
"""

from __future__ import annotations

import inspect
import typing
from typing import Annotated, Any, get_args, get_origin

from torch import Tensor

from tokenspeed.ir.builder import CallNode, Frame, Proxy, caller, current
from tokenspeed.ir.errors import Origin, SpecError
from tokenspeed.ir.spec import Spec, parse_spec


class PortSpec:
    """One tensor of the program's interface: placement and dtype. `optional`: a program that does not read it has no such port."""

    def __init__(self, spec: str, dtype: str = "i32", optional: bool = False) -> None:
        self.spec, self.dtype, self.optional = parse_spec(spec), dtype, optional


def Port(spec: str, dtype: str = "i32", optional: bool = False) -> Any:
    """Declares a field of a `Ports` struct: `ids = Port("t@dp")`. In a body the field is the tensor."""
    return PortSpec(spec, dtype, optional)


class Ports:
    """A struct of ports; a module that takes one receives every field. Subclasses list `name = Port("t@dp")`."""

    def __init__(self, values: dict[str, Proxy]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    @classmethod
    def fields(cls) -> dict[str, PortSpec]:
        out: dict[str, PortSpec] = {}
        for c in reversed(cls.__mro__):
            out.update({k: v for k, v in vars(c).items() if isinstance(v, PortSpec)})
        return out


class Param:
    """An op-with-weights owned by a module: gets its absolute `path` when the tree is named."""

    path: str = ""


class Signature:
    """The specs of a module's forward, read once a class."""

    def __init__(self, cls: type) -> None:
        fn = cls.forward  # type: ignore[attr-defined]
        code = fn.__code__
        self.origin = Origin(code.co_filename, code.co_firstlineno)
        scope = fn.__globals__  # of the module that defines it: a subclass may inherit the signature
        try:
            hints = typing.get_type_hints(fn, globalns=scope, include_extras=True)
        except NameError as e:
            raise SpecError(
                "P001", f"{self.origin}: the signature of {cls.__name__}.forward names something undefined: {e}"
            ) from None
        self.args: list[tuple[str, Spec | type[Ports]]] = []
        for name in list(inspect.signature(fn).parameters)[1:]:
            self.args.append((name, self._spec(cls, name, hints.get(name))))
        out = hints.get("return")
        if out is None:
            raise SpecError("P001", f"{self.origin}: {cls.__name__}.forward does not say how its result is placed")
        outs = get_args(out) if get_origin(out) is tuple else (out,)
        self.outs: list[Spec] = [typing.cast(Spec, self._spec(cls, "return", o)) for o in outs]

    def _spec(self, cls: type, name: str, hint: Any) -> Spec | type[Ports]:
        if isinstance(hint, type) and issubclass(hint, Ports):
            return hint
        if get_origin(hint) is Annotated:
            base, *notes = get_args(hint)
            texts = [n for n in notes if isinstance(n, str)]
            if base is Tensor and len(texts) == 1:
                try:
                    return parse_spec(texts[0])
                except SpecError as e:
                    raise SpecError(
                        e.code, f"{self.origin}: argument {name!r} of {cls.__name__}.forward: {e.message}"
                    ) from None
        raise SpecError(
            "P001",
            f'{self.origin}: {name!r} of {cls.__name__}.forward needs a placement, e.g. Annotated[Tensor, "t* h"]',
        )


class Module:
    """Base of every annotated module. Subclasses define `forward` with annotated tensors."""

    path: str = ""
    _signatures: typing.ClassVar[dict[type, Signature]] = {}

    @classmethod
    def signature(cls) -> Signature:
        if cls not in Module._signatures:
            Module._signatures[cls] = Signature(cls)
        return Module._signatures[cls]

    def forward(self, *args: Any) -> Any:
        raise SpecError("P001", f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any) -> Any:
        at = caller()
        trace = current()
        frame, inputs = open_frame(self, args, at)
        trace.frames.append(frame)
        try:
            result = self.forward(*args_in_frame(self, frame))
        finally:
            trace.frames.pop()
        outs = result if isinstance(result, tuple) else (result,)
        close_frame(self, frame, outs)
        names = [trace.fresh() for _ in outs]
        trace.frame.nodes.append(CallNode(frame, inputs, names, at))
        proxies = tuple(Proxy(n, at) for n in names)
        return proxies if isinstance(result, tuple) else proxies[0]


def flatten_args(module: Module, args: tuple[Any, ...], at: Origin) -> list[tuple[str, Spec | None, str]]:
    """(argument name, spec, value name) of every tensor that goes in; a Ports argument is its fields."""
    sig = module.signature()
    if len(args) != len(sig.args):
        raise SpecError("P004", f"{at}: {type(module).__name__} takes {len(sig.args)} arguments, got {len(args)}")
    flat: list[tuple[str, Spec | None, str]] = []
    for (name, spec), arg in zip(sig.args, args):
        if isinstance(spec, Spec):
            if not isinstance(arg, Proxy):
                raise SpecError(
                    "P004",
                    f"{at}: argument {name!r} of {type(module).__name__} must be one tensor, got {type(arg).__name__}",
                )
            flat.append((name, spec, arg.name))
        else:
            if not isinstance(arg, spec):
                raise SpecError("P004", f"{at}: argument {name!r} of {type(module).__name__} must be a {spec.__name__}")
            for field, port in spec.fields().items():
                flat.append((f"{name}.{field}", port.spec, getattr(arg, field).name))
    return flat


def open_frame(module: Module, args: tuple[Any, ...], at: Origin) -> tuple[Frame, list[str]]:
    flat = flatten_args(module, args, at)
    frame = Frame(module.path, type(module).__name__, origin=module.signature().origin)
    frame.in_names = [name for name, _, _ in flat]
    frame.in_specs = [spec for _, spec, _ in flat]
    return frame, [value for _, _, value in flat]


def args_in_frame(module: Module, frame: Frame) -> list[Any]:
    """What `forward` receives: proxies named like the arguments."""
    values = {n: Proxy(n, frame.origin) for n in frame.in_names}
    out: list[Any] = []
    for name, spec in module.signature().args:
        out.append(values[name] if isinstance(spec, Spec) else spec({f: values[f"{name}.{f}"] for f in spec.fields()}))
    return out


def close_frame(module: Module, frame: Frame, outs: tuple[Any, ...]) -> None:
    sig = module.signature()
    if len(outs) != len(sig.outs) or not all(isinstance(o, Proxy) for o in outs):
        raise SpecError(
            "P004", f"{frame.origin}: {type(module).__name__} declares {len(sig.outs)} results and returns {len(outs)}"
        )
    frame.out_names = [o.name for o in outs]
    frame.out_specs = list(sig.outs)


def name_tree(module: Module, path: str = "") -> None:
    """Gives every module and parameter its dotted path: attribute names and list positions, first owner wins."""
    seen: set[int] = set()

    def visit(obj: Any, at: str) -> None:
        if isinstance(obj, Module | Param):
            if id(obj) in seen:
                return
            seen.add(id(obj))
            obj.path = at
            for key, value in vars(obj).items():
                if key != "path":
                    visit(value, f"{at}.{key}" if at else key)
        elif isinstance(obj, list | tuple):
            for i, item in enumerate(obj):
                visit(item, f"{at}.{i}")

    visit(module, path)
