"""Frozen dataclasses to JSON and back, with every value checked against its annotation."""

import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")
LARGEST = 1e100  # numbers beyond it overflow as soon as something is computed from them


def to_json(value: Any) -> Any:
    """Dictionaries, lists and plain values. A number that is not finite becomes None."""
    if is_dataclass(value):
        return {key: to_json(getattr(value, name)) for name, key in _keys(type(value)).items()}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(kind: type[Record], value: Any) -> Record:
    """Undo `to_json`.

    Raises:
        ValueError: a value is not of the annotated type, or a `__post_init__` refuses what it got.
            The message names the place, such as `layers[2].gamma.mean`.
    """
    read: Record = _read(kind, value, "")
    return read


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _read(kind, value, where)
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list", value)
        if arguments[-1] is Ellipsis:
            kinds = [arguments[0]] * len(value)
        else:
            _expect(len(value) == len(arguments), where, f"{len(arguments)} values", value)
            kinds = list(arguments)
        return tuple(_read(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return dict(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _expect(is_number, where, "a number", value)
    else:
        _expect(type(value) is kind, where, f"of type {kind.__name__}", value)
    if is_number:
        _expect(-LARGEST <= value <= LARGEST, where, f"finite, at most {LARGEST:g}", value)
    return float(value) if kind is float else value


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints, keys = get_type_hints(kind), _keys(kind)
    missing = [key for key in keys.values() if key not in value]
    unknown = [key for key in value if key not in keys.values()]
    if missing or unknown:
        raise ValueError(f"{where or 'the file'}: missing {missing}, unknown {unknown}")
    read = {name: _read(hints[name], value[key], _join(where, key)) for name, key in keys.items()}
    try:
        return kind(**read)
    except ValueError as error:
        raise ValueError(f"{where or 'the file'}: {error}") from error


def _keys(kind: Any) -> dict[str, str]:
    """Names of the fields, and their keys in JSON where a key is not a name of Python."""
    return {field.name: field.metadata.get("key", field.name) for field in fields(kind)}


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _expect(condition: bool, where: str, what: str, value: Any) -> None:
    if not condition:
        text = str(value)
        text = text if len(text) <= 60 else f"{text[:59]}…"
        raise ValueError(f"{where or 'the file'} must be {what}, got {text!r}")
