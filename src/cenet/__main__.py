"""The `cenet` command, and `python -m cenet` for torchrun; missing extras are named in one line."""

import sys

from cenet.extras import MissingExtraError, require
from cenet.version import VERSION

EXTRAS = {
    "demo": ("demo",),
    "detect": ("detection",),
    "diagnose": ("report",),
    "eval": ("train",),
    "export": ("cli", "models"),
    "models": ("cli", "models"),
    "recipes": ("train",),
    "report": ("report",),
    "sites": ("cli", "models"),
    "train": ("train",),
}


def main() -> None:
    """Entry point of the `cenet` command."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print(f"cenet {VERSION}")
        return
    try:
        require(*EXTRAS.get(arguments[0] if arguments else "", ("cli",)))
    except MissingExtraError as error:
        raise SystemExit(str(error)) from error
    from cenet import cli

    cli.main()


if __name__ == "__main__":
    main()
