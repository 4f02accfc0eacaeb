"""Parses command-line flags into a dataclass in which each field is a flag."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

T = TypeVar("T")


def flag(
    help: str,
    default: Any = None,
    *,
    names: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    **options: Any,
) -> Any:
    """A dataclass field that is a command-line flag.

    Field `num_layers` becomes `--num-layers`. A `bool` flag takes no value; if the flag is given, the field is True.

    Args:
        default: the value of the field if the flag is not given; with `dataclasses.MISSING`, the flag is required. If
            the default is a string, argparse converts this string in the same way as the text of the flag.
        names: additional names of the flag.
        parse: function that converts the text of the flag to a value, or raises `argparse.ArgumentTypeError`; by
            default the type of the field determines the conversion.
        options: further arguments of argparse's `add_argument`, such as `choices`, `nargs` and `metavar`; options that
            are None are left out. With `action="append"`, the user may repeat the flag, and the field is a list.
    """
    given = {name: value for name, value in options.items() if value is not None}
    metadata = {"help": help, "names": tuple(names), "parse": parse, **given}
    return field(default=default, kw_only=True, metadata=metadata)


class FlagParser(argparse.ArgumentParser):
    """Argument parser that raises `ValueError` instead of exiting, so that only one rank needs to print the error."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            name = message.removeprefix("argument ").partition(":")[0].partition("/")[0]
            message += f"; a value that begins with - is given as {name}=VALUE"
        raise ValueError(message)


def parse_flags(arguments: type[T], groups: Sequence[type], argv: Sequence[str], prog: str) -> T:
    """Parse `argv` into an instance of the dataclass `arguments`.

    Args:
        arguments: the dataclass; its fields come from the base classes `groups`.
        groups: dataclasses of flags in the order of `--help`; the first line of a dataclass's docstring is the title of
            its flags.

    Raises:
        ValueError: a flag is unknown or missing, or a value has the wrong type; the message is one line.
    """
    return arguments(**vars(make_parser(groups, prog=prog).parse_args(argv)))


def take_flags(arguments: type[T], groups: Sequence[type], argv: Sequence[str]) -> tuple[T, list[str]]:
    """Parse the flags of `groups` anywhere in `argv`; return an instance of `arguments` and the rest of `argv`.

    Raises:
        ValueError: a flag is missing, or a value has the wrong type; the message is one line.
    """
    taken, rest = make_parser(groups, add_help=False).parse_known_args(argv)
    return arguments(**vars(taken)), rest


def make_parser(groups: Sequence[type], **options: Any) -> FlagParser:
    """A parser for the flags of the dataclasses `groups`; `options` are arguments of `argparse.ArgumentParser`."""
    parser = FlagParser(allow_abbrev=False, **options)
    for group in groups:
        add_flags(parser.add_argument_group(title_of(group)), group, fields(group))
    return parser


def title_of(group: type) -> str:
    """The title of a dataclass's flags in `--help`: the first line of its docstring."""
    return (group.__doc__ or group.__name__).splitlines()[0].rstrip(".")


def add_flags(section: argparse._ArgumentGroup, group: type, entries: Sequence[Field[Any]]) -> None:
    """Add a flag to the `section` of a parser for each of `entries`, which are fields of the dataclass `group`."""
    hints = get_type_hints(group)
    for entry in entries:
        _add(section, entry, hints[entry.name])


def _add(section: argparse._ArgumentGroup, entry: Field[Any], hint: Any) -> None:
    options: dict[str, Any] = {"dest": entry.name, **entry.metadata}
    names = (f"--{entry.name.rstrip('_').replace('_', '-')}", *options.pop("names"))
    parse = options.pop("parse")
    if entry.default is MISSING:
        options["required"] = True
    else:
        options["default"] = entry.default
        if entry.default is not None and entry.default is not False:
            options["help"] += f" (default: {entry.default})"
    options["help"] = options["help"].replace("%", "%%")
    if hint is bool:
        section.add_argument(*names, action="store_true", **options)
        return
    options["type"] = convert = parse or _converter(hint)
    if "choices" not in options:
        options.setdefault("metavar", {_integer: "INT", Path: "FILE"}.get(convert, convert.__name__.upper()))
    section.add_argument(*names, **options)


def _converter(hint: Any) -> Any:
    """The converter for a field's type, such as `_integer` for `int`, `int | None` and `list[int] | None`."""
    types = (hint, *get_args(hint), *(innermost for inner in get_args(hint) for innermost in get_args(inner)))
    for inner in types:
        if inner is int:
            return _integer
        if inner in (float, str, Path):
            return inner
    raise TypeError(f"no flag can be made of the type {hint}")


def _integer(text: str) -> int:
    """Parse an integer that fits in an int64 tensor."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if abs(value) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is beyond 64 bits")
    return value
