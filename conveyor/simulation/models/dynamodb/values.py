"""Attribute values: how DynamoDB validates, compares and adds them, and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal, InvalidOperation
from typing import Any

from conveyor.engines.aws.errors import AwsError

Attribute = Mapping[str, Any]
Item = dict[str, Attribute]

# The precision and the range of DynamoDB's numbers.
_EXACT = Context(prec=38)
_EXPONENT_MAX = 125
_ORDERED = frozenset({"S", "N", "B"})


class NotModelled(NotImplementedError):
    """The real service may know this request, but the model does not."""


def invalid(message: str) -> AwsError:
    return AwsError("ValidationException", message)


def check_known(what: str, params: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = params.keys() - known
    if unknown:
        raise NotModelled(f"{what} with {sorted(unknown)}")


def checked(item: Mapping[str, Attribute]) -> Item:
    """The item as DynamoDB stores it: numbers in their shortest form."""
    valid: Item = {}
    for name, value in item.items():
        valid[name] = value if "S" in value and len(value) == 1 else _checked(value)
    return valid


def _checked(value: Attribute) -> Attribute:
    if len(value) != 1:
        raise invalid("Supplied AttributeValue has more than one datatypes set")
    ((kind, inner),) = value.items()
    match kind:
        case "N":
            return {"N": shortest(inner)}
        case "S" | "B" | "BOOL":
            return value
        case "NULL" if inner is True:
            return value
        case "L":
            return {"L": [_checked(element) for element in inner]}
        case "M":
            return {"M": checked(inner)}
        case _:
            raise NotModelled(f"attributes of type {kind}")


def shortest(text: str) -> str:
    """A number as DynamoDB returns it: without superfluous zeros and without an exponent."""
    if text.isdigit() and (text[0] != "0" or text == "0"):
        return text
    number = _number(text)
    if number == 0:
        return "0"
    plain = format(number, "f")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def _number(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise invalid(f"The parameter cannot be converted to a numeric value: {text}") from None
    if not number.is_finite() or abs(number.adjusted()) > _EXPONENT_MAX:
        raise invalid(f"Number overflow: {text}")
    if len(number.normalize(Context(prec=100)).as_tuple().digits) > _EXACT.prec:
        raise invalid("Attempting to store more than 38 significant digits in a Number")
    return number


def is_equal(one: Attribute | None, other: Attribute | None) -> bool:
    if one is None or other is None:
        return False
    if "N" in one and "N" in other:
        return _number(one["N"]) == _number(other["N"])
    return one == other


def compared(one: Attribute | None, other: Attribute | None) -> int | None:
    """Negative, zero or positive, as the first value is less than, equal to or greater than the
    second. None if they have no order: their types differ, or one is missing."""
    if one is None or other is None:
        return None
    ((kind, left),) = one.items()
    if kind not in other or kind not in _ORDERED:
        return None
    right = other[kind]
    if kind == "N":
        left, right = _number(left), _number(right)
    return int(left > right) - int(left < right)


def added(one: Attribute | None, delta: Attribute) -> Attribute:
    """The sum. A missing value counts as 0."""
    if "N" not in delta or (one is not None and "N" not in one):
        raise invalid("An operand in the update expression has an incorrect data type")
    start = Decimal(0) if one is None else _number(one["N"])
    total = _EXACT.add(start, _number(delta["N"]))
    return {"N": shortest(str(total))}
