"""Kernels that start while the one before them ends touch no memory before that has ended."""

import ast
from pathlib import Path

import pytest

import cenet

FILES = sorted((Path(cenet.__file__).parent / "kernels").glob("*.py"))


def kernels():
    """Name and body of every kernel that some file launches."""
    trees = [ast.parse(file.read_text()) for file in FILES]
    launched = {
        node.args[0].id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch"
    }
    return {
        node.name: node.body
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in launched
    }


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_first_waits_for_the_one_before(name):
    """What a compiled kernel does first, `test_other_gpus.py` reads off its PTX."""
    body = kernels()[name]
    first = body[1] if ast.get_docstring(ast.Module(body, [])) else body[0]
    assert ast.unparse(first) == "await_previous_launch()"


def test_no_kernel_is_missed():
    assert len(kernels()) == 22
