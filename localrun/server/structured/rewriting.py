"""JSON schemas in other words: older and other dialects as Draft 2020-12, and what the grammar library gets wrong.

Each function takes one schema, an object, and returns it or a changed copy; none looks at the schemas inside. What it
returns describes the same values, or fewer of them where the library would let in some that are not described.

Pure. Does not: check what a keyword has for a value (schema.py does); what it does not understand it leaves alone.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

Schema = dict[str, Any]

# A double, which the library makes of every number, tells all whole numbers apart up to here.
EXACT_BELOW = 2**53
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
_OF_ARRAYS = ("items", "prefixItems")
_DECIDES_TYPE = frozenset({"type", "enum", "const", "$ref"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Decimals and digits of a bound that the library does not round.
_PLACES = 9
_DIGITS = 15

# Formats of texts. The library's own dates have a 29 February in every year and a second 60 in every minute, and its
# host names labels of which only a table tells whether they are right. Readers refuse these, so here are stricter ones:
# years with a leap day are a regular language. All are of RFC 3339 and RFC 1123, without what hardly any reader takes
# (lower-case `t` and `z`, the year 0, labels with two hyphens in a row).
_BELOW_100_IN_FOURS = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_BELOW_100_IN_FOURS}|({_BELOW_100_IN_FOURS})00)"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY_OF_YEAR = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR_AND_MINUTE})"
# Four labels of 62 characters and the points between them are within the 253 of a name, and a label's 63.
_LABEL = "([A-Za-z0-9]{1,62}|[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){1,2})"

FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
}
_OF_LIBRARY = frozenset({"duration", "email", "ipv4", "ipv6", "uri", "uuid"})
ENFORCED_FORMATS = tuple(sorted({*FORMAT_PATTERNS, *_OF_LIBRARY}))
# What OpenAPI and generators of schemas say about a value without holding it to anything that a grammar could.
_OF_NUMBERS = frozenset(
    {"int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal"}
)
FORMATS_WITHOUT_MEANING = _OF_NUMBERS | {"password", "string", "text"}


def modern(schema: Schema) -> Schema:
    """Draft 3 to 7 and OpenAPI as Draft 2020-12: tuples, bounds that are true or false, `required` in a property,
    `nullable`, types in capital letters, `any`, and keywords that are null, which some write for those they lack."""
    new = {keyword: value for keyword, value in schema.items() if value is not None or keyword == "const"}
    if isinstance(new.get("items"), list):
        first, rest = new.pop("items"), new.pop("additionalItems", True)
        new |= ({"prefixItems": first} if first else {}) | ({} if rest is True else {"items": rest})
    new.pop("additionalItems", None)  # beside one schema for all items it has no meaning
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if new.get(exclusive) is True and bound in new:
            new[exclusive] = new.pop(bound)
        elif isinstance(new.get(exclusive), bool):
            del new[exclusive]
    if isinstance(new.get("required"), bool):
        del new["required"]
    properties = new.get("properties")
    if isinstance(properties, dict):
        names = [name for name, each in properties.items() if isinstance(each, dict) and each.get("required") is True]
        if names and isinstance(new.get("required", []), list):
            new["required"] = [*new.get("required", []), *names]
    if new.get("$recursiveRef") == "#":
        new["$ref"] = new.pop("$recursiveRef")
    types = new.get("type")
    if isinstance(types, str):
        types = types.lower() if types.isupper() else types
        new["type"] = types
    if types == "any" or (isinstance(types, list) and "any" in types):
        del new["type"]
    return _or_null(new) if isinstance(new.pop("nullable", None), bool) and schema["nullable"] else new


def _or_null(schema: Schema) -> Schema:
    types = schema.get("type")
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if types is not None:
        types = types if isinstance(types, list) else [types]
        schema["type"] = types if "null" in types else [*types, "null"]
    elif {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        shared: Schema = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
        return {"anyOf": [schema, {"type": "null"}], **shared}
    return schema


def merged(schema: Schema) -> Schema:
    """`allOf` of a single schema is that schema, where both have no word in common."""
    alone = schema.get("allOf")
    if not isinstance(alone, list) or len(alone) != 1 or not isinstance(alone[0], dict):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    if alone[0].keys() & rest.keys() or ("$ref" in alone[0] and rest) or are_apart(alone[0], rest):
        return schema
    return rest | alone[0]


def are_apart(one: Schema, other: Schema) -> bool:
    """Whether a keyword of one is about what the same schema does not list, and the other one lists something: together
    they would mean something else."""
    return any(
        (rest & one.keys() and listed & other.keys()) or (rest & other.keys() and listed & one.keys())
        for rest, listed in (
            ({"additionalProperties"}, {"properties", "patternProperties"}),
            ({"items"}, {"prefixItems"}),
        )
    )


def named_by(schema: Schema, names: Any) -> Schema | None:
    """`schema` with `names`, its `propertyNames`, said in other words; None where there are none for it."""
    if isinstance(names, dict):
        names = {word: value for word, value in names.items() if word not in ("title", "description")}
    if names is True or names in ({}, {"type": "string"}):
        return schema
    if not isinstance(names, dict) or names.keys() - {"type", "pattern", "enum", "const"}:
        return None
    if schema.keys() & {"properties", "patternProperties"} or names.get("type", "string") != "string":
        return None
    if len(names.keys() - {"type"}) > 1:
        return None
    allowed = [names["const"]] if "const" in names else names.get("enum")
    values = schema.get("additionalProperties", True)
    if isinstance(names.get("pattern"), str):
        return schema | {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    if not isinstance(allowed, list) or not all(isinstance(name, str) for name in allowed):
        return None
    return schema | {"properties": dict.fromkeys(allowed, values), "additionalProperties": False}


def typed(schema: Schema) -> Schema:
    """What lists properties is an object, and what describes items an array: nobody means "or any other value"."""
    if _DECIDES_TYPE & schema.keys():
        return schema
    alternatives = [each for keyword in ("anyOf", "oneOf", "allOf") for each in schema.get(keyword, ())]
    if any(isinstance(each, dict) and _DECIDES_TYPE & each.keys() for each in alternatives):
        return schema
    kinds = [kind for kind, words in (("object", _OF_OBJECTS), ("array", _OF_ARRAYS)) if schema.keys() & set(words)]
    return {"type": kinds[0], **schema} if len(kinds) == 1 else schema


def patterned(schema: Schema) -> Schema:
    """The formats that are written here as patterns."""
    pattern = FORMAT_PATTERNS.get(schema.get("format", ""))
    if pattern is None:
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    if "pattern" not in rest:
        return rest | {"pattern": pattern}
    # Where values of another kind are allowed, the pattern says nothing about them here either.
    return rest | {"allOf": [*rest.get("allOf", ()), {"pattern": pattern}]}


def exact(schema: Schema) -> tuple[Schema, list[str]]:
    """Constants and bounds that the library keeps, and the keywords that are left out because it would not.

    Of whole numbers it makes doubles, so that beyond 2^53 others would come out: such constants become any whole
    number. Some bounds of fractions that are excluded themselves it lets in, and it rounds those with many digits: they
    are moved to the inside by a billionth.
    """
    new = dict(schema)
    lost = [keyword for keyword in _BOUNDS if abs(new.get(keyword, 0)) >= EXACT_BELOW]
    lost += [keyword for keyword in ("const", "enum") if keyword in new and not _is_exact(new[keyword])]
    for keyword in lost:
        values = new.pop(keyword)
        if keyword in ("const", "enum"):
            kept = [value for value in values if _is_exact(value)] if keyword == "enum" else []
            either = [*([{"enum": kept}] if kept else []), {"type": "integer"}]
            new["allOf"] = [*new.get("allOf", ()), {"anyOf": either} if kept else either[0]]
    return new if "number" not in new.get("type", "number") else _moved_inside(new), lost


def _moved_inside(schema: Schema) -> Schema:
    low, is_low_out = _innermost(schema, "minimum", "exclusiveMinimum", 1)
    high, is_high_out = _innermost(schema, "maximum", "exclusiveMaximum", -1)
    new = {keyword: value for keyword, value in schema.items() if keyword not in _BOUNDS}
    # The library forgets that a bound is excluded where the other one has the same whole part, and that -0 is 0.
    is_narrow = low is not None and high is not None and int(low) == int(high)
    if low is not None:
        new |= _bound("minimum", "exclusiveMinimum", low, is_low_out, 1 if is_narrow and low >= 0 else 0)
    if high is not None:
        new |= _bound(
            "maximum", "exclusiveMaximum", high, is_high_out, -1 if high == 0 or (is_narrow and high < 0) else 0
        )
    return new


def _innermost(schema: Schema, inclusive: str, exclusive: str, sign: int) -> tuple[Decimal | None, bool]:
    """The bound that counts, and whether it is excluded itself; None where there is none."""
    found = [
        (sign * Decimal(repr(schema[word])), word == exclusive) for word in (inclusive, exclusive) if word in schema
    ]
    if not found:
        return None, False
    bound, is_excluded = max(found)
    return sign * bound, is_excluded


def _bound(inclusive: str, exclusive: str, bound: Decimal, is_excluded: bool, step: int) -> Schema:
    """The words for a bound; with a `step` (1: up, -1: down) an excluded one is moved there, to where it belongs."""
    rounding = ROUND_CEILING if inclusive == "minimum" else ROUND_FLOOR
    unit = Decimal(1).scaleb(-min(_PLACES, _DIGITS - len(str(int(abs(bound))))))
    rounded = bound.quantize(unit, rounding)
    if is_excluded and step and rounded == bound:
        rounded += step * unit
    word = exclusive if is_excluded and rounded == bound else inclusive
    return {word: int(rounded) if rounded == int(rounded) else float(rounded)}


def _is_exact(value: Any) -> bool:
    """Whether the library writes a constant as it is: whole numbers beyond what doubles tell apart it does not."""
    if isinstance(value, list | dict):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or isinstance(value, bool) or abs(value) <= EXACT_BELOW
