"""The compiled passes under AddressSanitizer: none reads or writes outside of its tensors.

Numeric tests of `test_cpu.py` run in a process of their own, with passes in which the compiler
checks every access to memory.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cenet import cpu

TESTS = Path(__file__).with_name("test_cpu.py")
# a compiler that adds a check of every access to memory (AddressSanitizer)
CHECKING = """#!/bin/sh
unset LD_PRELOAD
test "$1" = --version && exec {compiler} --version
exec {compiler} "$@" -O1 -g -fsanitize=address
"""
# tests, with passes that are compiled from another source if one is given
UNDER_CHECK = """
import sys
from pathlib import Path
import pytest
from cenet import cpu
tests, names, *source = sys.argv[1:]
cpu.SOURCE = Path(source[0]) if source else cpu.SOURCE
cpu.SECONDS = 600
sys.exit(pytest.main(["-q", "-x", "-s", "-n0", "-pno:cacheprovider", tests, "-k", names]))
"""
ALL_PASSES = "measuring or mapping or gradient_through or newton or products or pooling or one_pass"
OUTSIDE = {
    "remainders of planes": ("LANES, pixels - (v + w) * LANES);", "LANES, LANES);"),
    "remainders of rows": ("store_row(y + at, value, task.size);", "store_row(y + at, value);"),
}


@pytest.mark.parametrize("instructions", ["default", "avx2", "avx512"])
def test_no_pass_leaves_the_memory_of_its_tensors(instructions, tmp_path):
    if not _has(instructions):
        pytest.skip(f"this processor has no {instructions}")
    run = _checked_run(tmp_path, ALL_PASSES, ATEN_CPU_CAPABILITY=instructions)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_pass_that_writes_behind_a_tensor_is_noticed(name, tmp_path):
    before, after = OUTSIDE[name]
    assert before in cpu.SOURCE.read_text()
    source = tmp_path / "cpu.cpp"
    source.write_text(cpu.SOURCE.read_text().replace(before, after))
    run = _checked_run(tmp_path, "mapping", source)
    assert run.returncode != 0
    assert "AddressSanitizer" in run.stderr


def _checked_run(folder, names, *source, **environment):
    """Run tests of the passes in a process whose passes check every access to memory."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    libraries = [_library_of(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip(f"{compiler} has no AddressSanitizer")
    checking = folder / "c++"
    checking.write_text(CHECKING.format(compiler=compiler))
    checking.chmod(0o700)
    return subprocess.run(
        [sys.executable, "-c", UNDER_CHECK, str(TESTS), f"this_machine or {names}", *source],
        env={
            **os.environ,
            "CXX": str(checking),
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # those of Python
            "XDG_CACHE_HOME": str(folder),
            **environment,
        },
        capture_output=True,
        text=True,
    )


def _has(instructions):
    order = ["default", "avx2", "avx512"]
    here = torch.backends.cpu.get_cpu_capability().lower()
    return here in order and order.index(instructions) <= order.index(here)


def _library_of(compiler, name):
    asked = [compiler, f"-print-file-name={name}"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()
