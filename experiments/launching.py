"""Starts commands in processes that have already imported the large libraries.

Importing torch, torchvision and timm takes ten seconds, and longer if several processes do it at
once. If every run and every measurement did this, the GPU would wait. So one process imports them
and is forked for each command (the forkserver of `multiprocessing`).
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

# importing them starts no thread of Python and does not touch the GPU, so that a fork is safe
LIBRARIES = ["torchvision", "timm", "cenet.cli", "cenet.train", "experiments.__main__"]
BEGINNING = "$ python -m "  # of a command in a log


class Command:
    """A running `python -m MODULE ARGUMENTS`, with the methods of `subprocess.Popen` that we need.

    Args:
        module: what `python -m` would run.
        arguments: of the command.
        log: the file that its output is added to.
    """

    def __init__(self, module: str, arguments: list[str], log: Path) -> None:
        """Start it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LIBRARIES)
        self._process = context.Process(target=_run, args=(module, arguments, log))
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None as long as it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def wait(self) -> None:
        """Until it has ended."""
        self._process.join()


def _run(module: str, arguments: list[str], log: Path) -> None:
    with log.open("ab") as file:
        file.write(f"{BEGINNING}{module} {' '.join(arguments)}\n".encode())
        file.flush()
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    # a forkserver has its children start theirs by a forkserver too, which loaders are not made for
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
