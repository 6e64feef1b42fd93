"""What an option is, and everything that is generated from one: flag, environment variable, check, docs row.

An option is declared ONCE, as a field of a dataclass made with `option(...)`; its name, type and default are the
field's own. Flags, `TOKENSPEED_*` variables and the page docs/options.md are derived here, so they cannot drift.
The order of precedence is: given (keyword or flag), environment, default. Standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
ENV_PREFIX = "TOKENSPEED_"
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


class OptionError(ValueError):
    """An option has a wrong name or value; the text names the option, the value and what would be right."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. `type` is str, int, float, bool or list; `optional` says that None is a value too."""

    name: str
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str | int, ...]
    check: Callable[[Any], str | None] | None
    aliases: tuple[str, ...]
    positional: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    choices: tuple[str | int, ...] = (),
    check: Callable[[Any], str | None] | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is an option. `check` returns what is wrong with a value, or None.

    A field without a default is positional on the command line; `list` stands for a new empty list.
    """
    metadata = {"help": help, "choices": choices, "check": check, "aliases": aliases}
    if default is list:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def at_least(low: float, most: float = 2**31 - 1) -> Callable[[Any], str | None]:
    """A check: the value is `low` or more, and `most` or less: what a machine word of the scheduler holds."""

    def check(value: Any) -> str | None:
        if value is None or low <= value <= most:
            return None
        return f"must be at least {low}" if value < low else f"must be at most {most}"

    return check


def table(cls: type) -> tuple[Option, ...]:
    """The options of a dataclass, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    rows: list[Option] = []
    for field in dataclasses.fields(cls):
        hint, optional = hints[field.name], False
        if isinstance(hint, types.UnionType):
            optional = type(None) in typing.get_args(hint)
            (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
        positional = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default: Any = None if positional else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        rows.append(
            Option(
                name=field.name,
                type=typing.get_origin(hint) or hint,
                optional=optional,
                default=default,
                positional=positional,
                **field.metadata,
            )
        )
    return tuple(rows)


def parse(row: Option, text: str) -> Any:
    """The value that `text` (a flag's argument, an environment variable) stands for; OptionError when none."""
    text = text.strip()
    if row.optional and text.lower() in ("", "none"):
        return None
    try:
        if row.type is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if row.type is list:
            return [int(part) for part in text.split(",") if part.strip()]
        return row.type(text)
    except ValueError:
        raise OptionError(f"{row.name} is {text!r}: expected {_expected(row)}") from None


def validate(config: Any) -> None:
    """Raise OptionError for the first field of an options dataclass whose value is of a wrong type or refused."""
    for row in table(type(config)):
        value: Any = getattr(config, row.name)
        if value is None and row.optional:
            continue
        if not _fits(row, value):
            raise OptionError(f"{row.name} is {value!r}: expected {_expected(row)}")
        if row.choices and value not in row.choices:
            raise OptionError(f"{row.name} is {value!r}: expected one of {', '.join(map(str, row.choices))}")
        if row.check and (fault := row.check(value)):
            raise OptionError(f"{row.name} is {value!r}: {fault}")


def load(cls: type[T], given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> T:
    """An options object from what was given, then the environment, then the defaults. Raises OptionError."""
    environ = os.environ if environ is None else environ
    rows = {row.name: row for row in table(cls)}
    for name in given:
        if name not in rows:
            close = difflib.get_close_matches(name, rows, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(rows)}"
            raise OptionError(f"{name} is no option of {cls.__name__}{hint}")
    values = dict(given)
    for row in rows.values():
        if row.name in values or row.env not in environ:
            continue
        try:
            values[row.name] = parse(row, environ[row.env])
        except OptionError as fault:
            raise OptionError(f"environment variable {row.env}: {fault}") from None
    missing = [row.name for row in rows.values() if row.positional and row.name not in values]
    if missing:
        raise OptionError(f"{missing[0]} is missing: give it, or set {rows[missing[0]].env}")
    return cls(**values)


def add_arguments(parser: argparse.ArgumentParser, cls: type) -> None:
    """One flag an option. A flag that is not given leaves no attribute, so the environment can speak."""
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).splitlines()[0].rstrip("."))
    for row in table(cls):
        text = row.help.replace("%", "%%")
        if row.positional:
            parser.add_argument(row.name, metavar=row.name.upper(), nargs="?", default=argparse.SUPPRESS, help=text)
            continue
        flags = [row.flag, *row.aliases]
        text = f"{text} (default: {_show(row.default)})"
        if row.type is bool:
            group.add_argument(
                *flags, dest=row.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            metavar = "{" + ",".join(map(str, row.choices)) + "}" if row.choices else _METAVAR[row.type]
            group.add_argument(*flags, dest=row.name, default=argparse.SUPPRESS, metavar=metavar, help=text)


def from_args(cls: type[T], args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """The options object of a parsed command line (see `add_arguments`). Raises OptionError."""
    given = {}
    for row in table(cls):
        if hasattr(args, row.name):
            value = getattr(args, row.name)
            given[row.name] = parse(row, value) if isinstance(value, str) else value
    return load(cls, given, environ)


def markdown(*classes: type) -> str:
    """The page docs/options.md."""
    lines = [
        "# Options",
        "",
        "Generated by `python -m tokenspeed.cli.env --options > docs/options.md` from the tables in",
        "`tokenspeed/runtime/config.py`; a test keeps it fresh. A flag wins over its environment variable, which wins",
        "over the default. The same names are keyword arguments of `Engine`.",
    ]
    for cls in classes:
        title, _, rest = (cls.__doc__ or cls.__name__).partition("\n")
        lines += ["", f"## {title.rstrip('.')}", ""]
        if rest.strip():
            lines += [" ".join(rest.split()), ""]
        lines += ["| flag | environment | type | default | meaning |", "|---|---|---|---|---|"]
        for row in table(cls):
            flag = row.name.upper() if row.positional else ", ".join([row.flag, *row.aliases])
            kind = "|".join(map(str, row.choices)) if row.choices else _METAVAR[row.type].lower()
            kind = kind.replace("|", " \\| ")
            default = "required" if row.positional else _show(row.default)
            lines.append(f"| `{flag}` | `{row.env}` | {kind} | {default} | {row.help} |")
    return "\n".join(lines) + "\n"


_METAVAR = {str: "TEXT", int: "INT", float: "FLOAT", bool: "on|off", list: "INT,INT,..."}


def _fits(row: Option, value: Any) -> bool:
    if isinstance(value, list):
        return row.type is list and all(type(item) is int for item in value)
    if isinstance(value, bool):
        return row.type is bool
    return isinstance(value, (int, float) if row.type is float else row.type)


def _expected(row: Option) -> str:
    if row.choices:
        return "one of " + ", ".join(map(str, row.choices))
    names = {str: "text", int: "an integer", float: "a number", bool: "true or false", list: "integers, as in 1,2,4"}
    return names[row.type]


def _show(value: Any) -> str:
    if value in (None, "", []):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
