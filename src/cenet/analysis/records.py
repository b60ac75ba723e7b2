"""Frozen dataclasses to JSON and back, checked: what is not as declared gets one clear error."""

import math
import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


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


def from_json(kind: type[Record], value: Any, where: str = "") -> Record:
    """Undo `to_json`; ValueError that names the place if `value` is not of that kind."""
    read: Record = _read(kind, value, where)
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
        _expect(isinstance(value, dict), where, "an object", value)
        hints, keys = get_type_hints(kind), _keys(kind)
        missing = [key for key in keys.values() if key not in value]
        unknown = [key for key in value if key not in keys.values()]
        if missing or unknown:
            raise ValueError(f"{where or 'the file'}: missing {missing}, unknown {unknown}")
        make: Any = kind
        return make(**{n: _read(hints[n], value[k], _join(where, k)) for n, k in keys.items()})
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
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        _expect(number and math.isfinite(value), where, "a finite number", value)
        return float(value)
    _expect(type(value) is kind, where, f"of type {kind.__name__}", value)
    return value


def _keys(kind: Any) -> dict[str, str]:
    """Names of the fields, and their keys in JSON where these are no names of Python."""
    return {field.name: field.metadata.get("key", field.name) for field in fields(kind)}


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _expect(condition: bool, where: str, what: str, value: Any) -> None:
    if not condition:
        raise ValueError(f"{where or 'the file'} must be {what}, got {str(value)[:60]!r}")
