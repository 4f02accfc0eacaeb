from __future__ import annotations

from dataclasses import MISSING, dataclass

import pytest

from megatron.zero_bubble.session.flag_parser import FlagParser, flag, parse_flags


@dataclass
class First:
    """The first group.

    Only the first line is its title."""

    num_layers: int = flag("number of layers", MISSING)
    rate: float = flag("a rate", 0.5)
    is_on: bool = flag("100% on", False, names=("--also-on",))


@dataclass
class Second:
    """The second group."""

    name: str | None = flag("a name", None, choices=("small", "large"))
    sizes: list[int] | None = flag("sizes", None, nargs=2)
    pattern: str | None = flag("a pattern", None, names=("--layers",))
    paths: list[str] | None = flag("paths", None, nargs="*")


@dataclass
class Both(First, Second):
    filled_in_later: int = 0


GROUPS = (First, Second)


def parse(*argv: str) -> Both:
    return parse_flags(Both, GROUPS, argv, "program")


def test_a_field_is_a_flag_with_its_type_and_its_default():
    args = parse("--num-layers", "4")
    assert (args.num_layers, args.rate, args.is_on, args.name, args.sizes, args.paths) == (
        4,
        0.5,
        False,
        None,
        None,
        None,
    )
    args = parse("--num-layers", "4", "--rate", "1e-3", "--is-on", "--name", "large", "--sizes", "1", "2", "--paths")
    assert (args.rate, args.is_on, args.name, args.sizes, args.paths) == (1e-3, True, "large", [1, 2], [])
    assert isinstance(args.rate, float)
    assert parse("--num-layers", "4", "--paths", "a", "b").paths == ["a", "b"]


def test_a_flag_may_have_another_spelling():
    assert parse("--num-layers", "4", "--also-on").is_on


def test_fields_without_flag_are_no_flags():
    assert parse("--num-layers", "4").filled_in_later == 0
    with pytest.raises(ValueError, match="--filled-in-later"):
        parse("--num-layers", "4", "--filled-in-later", "1")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["required", "--num-layers"]),
        (["--num-layers"], ["--num-layers", "expected one argument"]),
        (["--pattern", "-M|*"], ["--pattern", "a value that begins with - is given as --pattern=VALUE"]),
        (["--num-layers", "four"], ["--num-layers", "invalid int value: 'four'"]),
        (["--num-layers", "4.5"], ["--num-layers", "invalid int value: '4.5'"]),
        (["--num-layers", "4", "--rate", "fast"], ["--rate", "invalid float value: 'fast'"]),
        (["--num-layers", "4", "--name", "medium"], ["--name", "medium", "small", "large"]),
        (["--num-layers", "4", "--sizes", "1"], ["--sizes", "expected 2 arguments"]),
        (["--num-layers", "4", "--is-on", "yes"], ["unrecognized", "yes"]),
        (["--num-layers", "4", "--unknown", "1"], ["unrecognized", "--unknown 1"]),
        (["--num-layers", "4", "--rat", "1"], ["unrecognized", "--rat 1"]),
    ],
)
def test_what_cannot_be_parsed_is_one_line(argv, words):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        parse(*argv)
    for word in words:
        assert word in str(error.value)


def test_help_shows_the_groups_in_order_with_defaults(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert text.index("The first group:") < text.index("a rate") < text.index("The second group:")
    assert "a rate (default: 0.5)" in text
    assert "100% on" in text
    assert "default: None" not in text
    assert "default: False" not in text


def test_a_field_of_a_type_without_a_word_for_it_is_refused():
    @dataclass
    class Strange:
        """Strange."""

        table: dict[str, int] = flag("a table", MISSING)

    @dataclass
    class Unparsable:
        """Unparsable."""

        value: complex = flag("a number", MISSING)

    with pytest.raises(TypeError, match="complex"):
        parse_flags(Unparsable, (Unparsable,), [], "program")


def test_errors_are_raised_and_not_printed(capsys):
    with pytest.raises(ValueError, match=r"^bad$"):
        FlagParser().error("bad")
    assert capsys.readouterr() == ("", "")
