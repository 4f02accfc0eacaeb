"""Every setting of every supported version of Megatron is in the table."""

from __future__ import annotations

import importlib
import zipfile
from collections import Counter
from pathlib import Path

import megatron.core
import pytest

from megatron.zero_bubble.launcher.hooks import minor_version
from megatron.zero_bubble.launcher.launch import SUPPORTED
from megatron.zero_bubble.mcore.refusals import flag_of_setting
from megatron.zero_bubble.mcore.refused_settings import REFUSALS
from tools.megatron_settings import SettingNames, main, recorded
from tools.setting_groups import effects

VERSIONS = recorded()
CORE = Path(importlib.import_module("megatron.core").__path__[0])
CONFIG = "megatron/core/transformer/transformer_config.py"
FLAGS = "megatron/training/arguments.py"

CLASSES = """
@dataclass
class BaseConfig:
    on: bool = True
    _own: int = 1
    made: int = field(init=False)

@dataclass(kw_only=True)
class LateConfig(BaseConfig):
    size: int = 1
    left: int = 2
    off: bool = False
    renamed: int = field(default=1, metadata={"argparse_meta": {"arg_names": ["--other"], "dest": "third"}})
"""
PARSER = """
def add(parser):
    exclude = ["left"]
    ArgumentGroupFactory(LateConfig, exclude=exclude).build_group(parser)
    group = parser.add_argument_group()
    group.add_argument("--a-b", "--a", type=int)
    group.add_argument("--rl-x", action=argparse.BooleanOptionalAction)
"""


def test_every_supported_version_is_recorded_and_no_other():
    assert [minor_version(version) for version in VERSIONS] == list(SUPPORTED)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_has_every_setting(version: str):
    """Read in the sources what a new setting does to forward, backward, W and the step, and add it to the table."""
    names = VERSIONS[version]
    assert names.missing() == []
    assert len(names.flags) > 600
    assert len(names.fields["megatron.core.transformer.transformer_config.TransformerConfig"]) > 150


def test_the_table_has_every_setting_once():
    counts = Counter(name for name, _ in effects())
    assert [name for name, count in counts.items() if count > 1] == []


def test_what_is_refused_sometimes_has_an_effect_otherwise():
    names = {name for name, _ in effects()}
    assert [name for row in REFUSALS for name in row.names.split() if name not in names] == []


def test_the_flags_of_refused_settings_are_megatron_lms():
    """A setting without a flag is one of a configuration class."""
    flags = {(flag, name) for names in VERSIONS.values() for flag, name in names.flags.items()}
    with_flag = {name for _, name in flags}
    for name in {name for row in REFUSALS for name in row.names.split()} & with_flag:
        assert (flag_of_setting(name), name) in flags


def test_the_record_of_the_installed_version_is_right():
    found = SettingNames.of([CORE.parents[1]])
    of_core = {name: fields for name, fields in found.fields.items() if name.startswith("megatron.core.")}
    was = VERSIONS[megatron.core.__version__]
    assert of_core == {name: list(fields) for name, fields in was.fields.items() if name in of_core}
    assert len(of_core) > 20


def test_a_new_field_and_a_new_flag_are_missing_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """In a copy of megatron-core's own class, and in a parser like Megatron-LM's."""
    text = (CORE / "transformer" / "transformer_config.py").read_text()
    field = "    mtp_num_layers: Optional[int] = None\n"
    assert text.count(field) == 1
    copied = write(tmp_path, CONFIG, text)
    write(tmp_path, FLAGS, "def add(parser):\n    parser.add_argument('--num-experts', type=int)\n")
    assert main("missing", str(tmp_path)) == 0
    copied.write_text(text.replace(field, "    fold_time: bool = False\n" + field))
    write(
        tmp_path, FLAGS, "def add(parser):\n    parser.add_argument('--no-warp', action='store_false', dest='warp')\n"
    )
    assert main("missing", str(tmp_path)) == 1
    assert capsys.readouterr().out == "fold_time\nwarp\n"


def test_a_new_configuration_class_is_missing_too(tmp_path: Path):
    source = "@dataclass\nclass NewConfig:\n    folds: int = 2\n"
    write(tmp_path, "megatron/core/new.py", source)
    assert SettingNames.of([tmp_path]).missing() == ["folds"]
    other = write(tmp_path / "other", "megatron/core/datasets/new.py", source).parents[3]
    assert SettingNames.of([other]).missing() == []


def test_flags_are_found_as_megatron_lm_makes_them(tmp_path: Path):
    """From calls, and from the fields of classes by `ArgumentGroupFactory`; in checkouts and in wheels."""
    write(tmp_path, "megatron/core/base.py", CLASSES)
    write(tmp_path, FLAGS, PARSER)
    expected = {"--no-on": "on", "--disable-on": "on", "--size": "size", "--off": "off", "--other": "third"}
    expected |= {"--a-b": "a_b", "--a": "a_b", "--rl-x": "rl_x", "--no-rl-x": "rl_x"}
    assert SettingNames.of([tmp_path]).flags == expected
    wheel = tmp_path / "megatron_core-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("megatron/core/base.py", FLAGS):
            archive.write(tmp_path / name, name)
    names = SettingNames.of([wheel])
    assert names.flags == expected
    again = SettingNames.parse(str(names))
    assert (again.fields, again.flags) == (names.fields, names.flags)


@pytest.mark.parametrize("given", [(), ("names",), ("other", "."), ("missing", "no/such/folder")])
def test_a_wrong_command_ends_with_2(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert main(*given) == 2
    assert capsys.readouterr().err


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file
