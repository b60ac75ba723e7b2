"""Lists the files and functions of cenet that a command runs through.

    python benchmarks/walk.py diagnose runs/digits_ce --ablation-images 8
    python benchmarks/walk.py report runs/digits_ce

Everything after the script is a command line of `cenet`, which runs as usual, in this process. Then
the files are printed in the order in which they were entered, with their functions. A function
counts once, however often it runs. Code that runs while a file is imported does not count.
"""

import sys
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import cenet
from cenet.cli import main

SOURCE = Path(cenet.__file__).parent
NOT_FUNCTIONS = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")


class Walk:
    """Collects every function of cenet that is called.

    Attributes:
        functions: by file, relative to the package, the qualified names of its functions.
    """

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, None]] = {}
        self._seen: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take in one event of `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        path = Path(code.co_filename)
        own = path.is_relative_to(SOURCE) and code.co_name not in NOT_FUNCTIONS
        if own and _imports(frame):
            return  # the function may be called again after the import
        self._seen.add(code)
        if own:
            file = str(path.relative_to(SOURCE))
            self.functions.setdefault(file, {})[code.co_qualname] = None


def _imports(frame: FrameType) -> bool:
    """Whether the function is called while a file is imported, or is the body of a class."""
    if not frame.f_code.co_flags & CO_OPTIMIZED:  # bodies of classes are not
        return True
    caller: FrameType | None = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and str(SOURCE) in caller.f_code.co_filename:
            return True
        caller = caller.f_back
    return False


def walk(arguments: list[str]) -> Walk:
    """Run `cenet` with these arguments and collect the functions it calls, in all threads."""
    found = Walk()
    sys.argv = ["cenet", *arguments]
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


if __name__ == "__main__":
    functions = walk(sys.argv[1:]).functions
    for file, names in functions.items():
        print(f"{file}: {', '.join(names)}")
    print(f"{len(functions)} files, {sum(map(len, functions.values()))} functions")
