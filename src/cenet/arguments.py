"""Shared by all commands: parsing by tyro, errors about arguments in one line, a progress bar."""

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from functools import partial, wraps
from io import StringIO
from typing import Any, TypeVar

from cenet.extras import require

require("cli")

import tyro
from rich.console import Console
from rich.progress import Progress, ProgressColumn, TimeRemainingColumn

T = TypeVar("T")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
EDGE = "╭╮╰╯│ "
RULE = re.compile("─|-+$")  # a rule of tyro's frame; one drawn in ASCII contains no headline


def progress_bar(*columns: ProgressColumn | str, shown: bool) -> Progress:
    """A progress bar on stderr with these columns, followed by the remaining time."""
    return Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown
    )


def parse(kind: Any, **options: Any) -> Any:
    """`tyro.cli`; wrong arguments exit with one line."""
    return _in_one_line(lambda: tyro.cli(kind, **options))


def run_command(commands: Mapping[str, Callable[..., None]], **options: Any) -> None:
    """Run one of several commands; wrong arguments exit with one line."""
    deferred = {name: _deferred(command) for name, command in commands.items()}
    parse = partial(tyro.extras.subcommand_cli_from_dict, deferred, **options)
    _in_one_line(parse)()


def _deferred(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """A function with the arguments of a command that returns the call instead of making it."""

    @wraps(command)
    def call(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return partial(command, *args, **kwargs)

    return call


def _in_one_line(parse: Callable[[], T]) -> T:
    said = StringIO()
    try:
        with redirect_stderr(said):
            return parse()
    except SystemExit as left:
        if said.getvalue():
            from cenet.distributed import is_first_process  # imports torch, for seconds

            # all processes have the same arguments; one message is enough
            if is_first_process():
                print(without_frame(said.getvalue()), file=sys.stderr)
        raise left from None


def without_frame(text: str) -> str:
    """tyro's message about wrong arguments, without frame, headline and explanations."""
    lines = [line.strip(EDGE) for line in COLOUR.sub("", text).splitlines()]
    parts: list[str] = [""]  # between the rules of the frame; the first is empty or the headline
    for line in lines:
        if RULE.match(line):
            parts.append("")
        else:
            parts[-1] = f"{parts[-1]} {line}".strip()
    known = [part for part in parts[1:] if part]
    advice = re.search(r"(?:run|see) (\S.* --help)", known[-1]) if known else None
    if len(known) < 2 or advice is None:
        return text.strip()
    better = [part for part in known[1:-1] if part.startswith(("Available", "Perhaps"))]
    return "; ".join([known[0].removesuffix("."), *better, f"see `{advice[1]}`"])
