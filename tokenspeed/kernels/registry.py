# pyright: strict
"""The set of registered kernels. Invariant: a name is registered once and never replaced, so an artifact that stores a
kernel's name and source hash can tell exactly what it will run.

The default registry holds this package's kernels and those of installed packages that expose a function under the
entry-point group `tokenspeed.kernels`; it is called with the registry and registers what it brings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

from tokenspeed.kernels.formats import FORMATS
from tokenspeed.kernels.ops import OPS, op_of
from tokenspeed.kernels.spec import KernelSpec, Priority
from tokenspeed.kernels.weights import QuantWeight, dense

PLUGIN_GROUP = "tokenspeed.kernels"


class Registry:
    """Kernels by name and by op."""

    def __init__(self) -> None:
        self._by_name: dict[str, KernelSpec] = {}
        self._by_op: dict[str, list[KernelSpec]] = {name: [] for name in OPS}

    def register(self, spec: KernelSpec) -> KernelSpec:
        """Adds `spec`; ValueError if its name is taken."""
        if spec.name in self._by_name:
            raise ValueError(f"kernel '{spec.name}' is already registered; give the new one its own name")
        self._by_name[spec.name] = spec
        self._by_op[spec.op].append(spec)
        return spec

    def get(self, name: str) -> KernelSpec:
        """The kernel called `name`; KeyError that lists the op's kernels or all of them otherwise."""
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(sorted(self._by_name))
            raise KeyError(f"no kernel is called '{name}'; registered: {known}") from None

    def of(self, op: str) -> tuple[KernelSpec, ...]:
        """Every kernel of `op`, in registration order."""
        op_of(op)
        return tuple(self._by_op[op])

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[KernelSpec]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)


def register_references(references: Mapping[str, Callable[..., Any]], registry: Registry | None = None) -> None:
    """Registers each op's reference (plain torch, returns new tensors) as the kernel `reference.<op>`.

    An op the table does not know is a KeyError. A reference that is already registered is left as it is, so two
    importers may both call this.
    """
    registry = default_registry() if registry is None else registry
    every = frozenset(FORMATS)
    for op, reference in references.items():
        name = f"reference.{op}"
        if name in registry:
            continue
        registry.register(
            KernelSpec(
                name=name,
                op=op,
                solution="reference",
                fn=_into_out(reference),
                signatures=(dict.fromkeys(op_of(op).roles, every),),
                priority=Priority.REFERENCE,
                tags=frozenset({"portability", "determinism"}),
                pack=dense,
                summary="the op's reference in plain torch",
            )
        )


def _into_out(reference: Callable[..., Any]) -> Callable[..., None]:
    """A reference as a kernel: its result is copied into `out`; without one the reference worked in place."""

    @functools.wraps(reference)
    def run(*inputs: Any, out: Any = None, **attrs: Any) -> None:
        dense = [x.dequantize() if isinstance(x, QuantWeight) else x for x in inputs]
        result = reference(*dense, **attrs)
        if out is None:
            return
        targets = cast("tuple[Any, ...]", out if isinstance(out, tuple) else (out,))
        values = cast("tuple[Any, ...]", result if isinstance(out, tuple) else (result,))
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    return run


@functools.cache
def default_registry() -> Registry:
    """This package's kernels and the installed plugins', registered once a process.

    A plugin that fails to load raises ImportError naming it: a kernel that was installed must not vanish silently.
    """
    from tokenspeed.kernels.builtin import register_builtin

    registry = Registry()
    register_builtin(registry)
    for entry in entry_points(group=PLUGIN_GROUP):
        try:
            entry.load()(registry)
        except Exception as error:
            raise ImportError(
                f"kernel plugin '{entry.name}' ({entry.value}) failed to register: {error}; "
                "fix it or uninstall its package"
            ) from error
    return registry
