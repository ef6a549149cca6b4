"""JSON schemas in other words: older and other dialects as Draft 2020-12, and what the grammar library gets wrong.

Each function takes one schema, an object, and returns it or a changed copy; none looks at the schemas inside. What it
returns describes the same values, or fewer of them where the library would let in some that are not described.

Pure. Does not: check what a keyword has for a value (schema.py does); what it does not understand it leaves alone.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import Any

from localrun.server.structured import formats

Schema = dict[str, Any]

# A double, which the library makes of every number, tells all whole numbers apart up to here.
EXACT_BELOW = 2**53
_OF_OBJECTS = ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
_OF_ARRAYS = ("items", "prefixItems")
_DECIDES_TYPE = frozenset({"type", "enum", "const", "$ref"})
# Decimals that a bound may have after it was moved to the inside.
_PLACES = 9
_DIGITS = 15


def modern(schema: Schema) -> Schema:
    """Draft 3 to 7 and OpenAPI as Draft 2020-12: tuples, bounds that are true or false, `required` in a property,
    `nullable`, types in capital letters, `any`."""
    new = dict(schema)
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
    """The values of `schema`, and null."""
    types = schema.get("type")
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if types is not None:
        schema["type"] = [*dict.fromkeys([*(types if isinstance(types, list) else [types]), "null"])]
    elif {"$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        shared = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
        return {"anyOf": [schema, {"type": "null"}], **shared}
    return schema


def merged(schema: Schema) -> Schema:
    """`allOf` of a single schema is that schema, where both have no word in common."""
    alone = schema.get("allOf")
    if not isinstance(alone, list) or len(alone) != 1 or not isinstance(alone[0], dict):
        return schema
    rest = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
    if alone[0].keys() & rest.keys() or ("$ref" in alone[0] and rest):
        return schema
    return rest | alone[0]


def named_by(schema: Schema, names: Any) -> Schema | None:
    """`schema` with `names`, its `propertyNames`, said in other words; None where there are none for it."""
    if names is True or names in ({}, {"type": "string"}):
        return schema
    if not isinstance(names, dict) or names.keys() - {"type", "pattern", "enum", "const"} or len(names) > 2:
        return None
    if schema.keys() & {"properties", "patternProperties"} or names.get("type", "string") != "string":
        return None
    allowed = [names["const"]] if "const" in names else names.get("enum")
    values = schema.get("additionalProperties", True)
    if "pattern" in names and allowed is None:
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
    pattern = formats.PATTERNS.get(schema.get("format", ""))
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
    number. Bounds of fractions that are excluded themselves it lets in at times, and it rounds those with many digits:
    they are moved to the inside by less than a billionth.
    """
    new = dict(schema)
    bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    lost = [keyword for keyword in bounds if abs(new.get(keyword, 0)) >= EXACT_BELOW]
    lost += [keyword for keyword in ("const", "enum") if keyword in new and not _is_exact(new[keyword])]
    for keyword in lost:
        values = new.pop(keyword)
        if keyword in ("const", "enum"):
            kept = [value for value in values if _is_exact(value)] if keyword == "enum" else []
            either = [*([{"enum": kept}] if kept else []), {"type": "integer"}]
            new["allOf"] = [*new.get("allOf", ()), {"anyOf": either} if kept else either[0]]
    return new if "number" not in new.get("type", "number") else _moved_inside(new), lost


def _moved_inside(schema: Schema) -> Schema:
    low, high = _inside(schema, "minimum", "exclusiveMinimum", 1), _inside(schema, "maximum", "exclusiveMaximum", -1)
    if low is not None and high is not None and low > high:
        return schema
    new = schema
    for keywords, bound in ((("minimum", "exclusiveMinimum"), low), (("maximum", "exclusiveMaximum"), high)):
        if bound is not None:
            new = {keyword: value for keyword, value in new.items() if keyword not in keywords}
            new[keywords[0]] = int(bound) if bound == int(bound) else float(bound)
    return new


def _inside(schema: Schema, inclusive: str, exclusive: str, sign: int) -> Decimal | None:
    """The innermost of two bounds as one that belongs to the values; None where there is none."""
    found = [(sign * Decimal(repr(schema[word])), word) for word in (inclusive, exclusive) if word in schema]
    if not found:
        return None
    bound, word = max(found, key=lambda each: (each[0], each[1] == exclusive))
    places = min(_PLACES, _DIGITS - len(str(int(abs(bound)))))
    moved = bound.quantize(Decimal(1).scaleb(-places), ROUND_CEILING)
    if word == exclusive and moved == bound:
        moved += Decimal(1).scaleb(-places)
    return sign * moved


def _is_exact(value: Any) -> bool:
    """Whether the library writes a constant as it is: whole numbers beyond what doubles tell apart it does not."""
    if isinstance(value, list | dict):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or isinstance(value, bool) or abs(value) <= EXACT_BELOW
