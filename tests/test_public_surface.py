"""What a user imports, and what is imported for it."""

from __future__ import annotations

import subprocess
import sys

from tests.test_architecture import PACKAGE, ROOT


def test_the_package_root_has_the_public_names_and_imports_nothing_before_they_are_used():
    code = (
        "import sys, megatron.zero_bubble as package\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'numpy', 'megatron.zero_bubble.', "
        "'megatron.core'))])\n"
        "assert set(package.__all__) == set(package._MODULES) <= set(dir(package))\n"
        "print(*(getattr(package, name).__module__ for name in package.__all__))\n"
        "from megatron.zero_bubble import *\n"
        "print(WeightGradStore is package.WeightGradStore, hasattr(package, 'Nothing'))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert lines[0] == "[]"
    assert lines[1].split() == [
        f"{PACKAGE}.{module}"
        for module in (
            *("pipeline.specs", "runtime.look_ahead", "pipeline.pipeline", "pipeline.options", "pipeline.specs"),
            *("runtime.weight_grad_store", "launcher.launch", "launcher.launch"),
            *("schedules", "mcore.vocabulary_model", "mcore.linear"),
        )
    ]
    assert lines[2] == "True False"
