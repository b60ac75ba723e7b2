"""The `cenet` command, and `python -m cenet` for torchrun; missing extras are named in one line."""

import os
import select
import sys
from typing import TextIO

from cenet.extras import MissingExtraError, require
from cenet.version import VERSION

EXTRAS = {
    "demo": ("demo",),
    "detect": ("detection",),
    "diagnose": ("report",),
    "eval": ("train",),
    "export": ("cli", "models"),
    "models": ("cli",),
    "recipes": ("train",),
    "report": ("report",),
    "sites": ("cli", "models"),
    "train": ("train",),
}


def main() -> None:
    """Entry point of the `cenet` command; ends quietly when the reader of its output has gone."""
    try:
        _main()
    except (BrokenPipeError, SystemExit) as error:
        if BrokenPipeError not in (type(error), type(error.__cause__)) or _has_reader(sys.stdout):
            raise
        raise SystemExit(1) from None
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # Python would try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_reader(stream: TextIO) -> bool:
    """Whether `stream` is anything but a pipe that was closed at its other end."""
    poll = select.poll()
    poll.register(stream, 0)  # errors alone
    return not poll.poll(0)


def _main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"cenet {VERSION}")
        return
    try:
        require(*EXTRAS.get(arguments[0] if arguments else "", ("cli",)))
    except MissingExtraError as error:
        raise SystemExit(str(error)) from error
    from cenet.cli import main

    main()


if __name__ == "__main__":
    main()
