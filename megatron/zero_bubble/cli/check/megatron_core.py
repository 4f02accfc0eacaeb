"""Makes megatron-core importable from a wheel or a folder, on machines where it is not installed."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import zipfile
from pathlib import Path

_HELPERS = "megatron/core/datasets/helpers_cpp"
"""Module that megatron-core needs to read data, compiled for one version of Python."""


def provide_megatron_core(given: Path | None, scratch: Path) -> list[Path]:
    """Make `import megatron.core` work in this process.

    Args:
        given: a wheel, or the folder that holds `megatron/core`; None if it is installed.
        scratch: a folder to unpack a wheel in.

    Returns:
        The folders that other processes need on their module path.

    Raises:
        ValueError: megatron-core is not there, or not for this Python.
    """
    paths: list[Path] = []
    if given is not None:
        folder = given.resolve()
        if given.is_file() and zipfile.is_zipfile(given):
            folder = scratch / "megatron-core"
            with zipfile.ZipFile(given) as wheel:
                wheel.extractall(folder)
        if not (folder / "megatron" / "core").is_dir():
            raise ValueError(f"argument --megatron-core: {given} is neither its wheel nor a folder with megatron/core")
        if not (folder / f"{_HELPERS}{sysconfig.get_config_var('EXT_SUFFIX')}").is_file():
            version = "cp{}{}".format(*sys.version_info)
            raise ValueError(f"argument --megatron-core: {given} is not for this Python: take the wheel for {version}")
        paths.append(folder)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ValueError(
            "megatron-core is not installed for this Python: bring its wheel (docs/gpu.md says how) and name "
            "it, --megatron-core FILE"
        )
    return paths
