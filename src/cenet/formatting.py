"""Numbers, names and comparisons of runs as text, on the terminal and on pages."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Literal

Kind = Literal["text", "number", "percent"]
Cell = str | float | int | None

MISSING = "–"
NARROW = "\u202f"  # narrow no-break space
LISTED = 4  # with more runs, a sentence names only the lowest and the highest
LONGEST = 28  # characters of a name in a drawing


def percent(share: float, form: str = ".1f", *, space: str = " ") -> str:
    """A share of 1 as a percentage.

    >>> percent(0.5844), percent(0.5844, ".2f")
    ('58.4 %', '58.44 %')
    """
    return f"{100 * share:{form}}{space}%"


def show(value: Cell, kind: Kind = "number", *, brief: bool = False) -> str:
    """A value as text for a table, or with one digit less for a sentence."""
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    if kind == "percent":
        return percent(value, ".1f" if brief else ".2f", space=NARROW)
    if isinstance(value, int):
        return f"{value:,}".replace(",", NARROW)
    return f"{value:#.{3 if brief else 4}g}".removesuffix(".")


def compare(values: Mapping[str, float | None], kind: Kind = "number") -> str:
    """The values of all runs in their order, `plain 11.6 %, ce 0.5 %`; a single run has no name.

    Of many runs only the lowest and the highest are named. Runs without a value are None, and at
    least one has a value.
    """
    known = [(value, name) for name, value in values.items() if value is not None]
    if len(values) == 1:
        return show(known[0][0], kind, brief=True)
    if len(known) > LISTED:
        ends = (
            f"{show(value, kind, brief=True)} ({name})" for value, name in (min(known), max(known))
        )
        return "from " + " to ".join(ends)
    return ", ".join(f"{name} {show(value, kind, brief=True)}" for value, name in known)


def brief(value: float) -> str:
    """Three digits in at most nine characters: `0.25`, `1.9e-4`, `1.87e-7`."""
    if value and not 1e-3 <= abs(value) < 1e4:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.3g}"


def nearest(name: object, valid: Iterable[str]) -> str:
    """' (did you mean …?)' with the valid names closest to `name`; empty if none is close."""
    close = get_close_matches(str(name), list(valid), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def count(number: int, noun: str) -> str:
    """`1 layer`, `3 layers`."""
    return f"{show(number)} {noun}" + ("" if number == 1 else "s")


def short(name: str, length: int = LONGEST) -> str:
    """A name of at most `length` characters: long ones lose their middle."""
    if len(name) <= length:
        return name
    head = (length - 1) // 2
    return f"{name[:head]}…{name[len(name) - (length - 1 - head) :]}"


def abbreviate(name: str, length: int) -> str:
    """A dotted name of at most `length` characters: words become initials, from the left.

    >>> abbreviate("stages.2.blocks.10.act1", 14)
    's.2.b.10.act1'
    """
    parts = name.split(".")
    for index in range(len(parts)):
        if len(".".join(parts)) <= length:
            break
        parts[index] = re.sub(r"[^\W\d]+", lambda word: word[0][0], parts[index])
    return short(".".join(parts), length)
