"""Formats of texts: those that the grammar library knows, those that are written here, and those that say nothing.

The library's own dates have a 29 February in every year and a second 60 in every minute, and its host names labels of
which only a table tells whether they are right. Readers refuse these, so here are stricter ones: years with a leap day
are a regular language. All are of RFC 3339 and RFC 1123, without what hardly any reader takes (lower-case `t` and `z`,
the year 0, labels with two hyphens in a row).

Pure.
"""

from __future__ import annotations

_BELOW_100_IN_FOURS = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_BELOW_100_IN_FOURS}|({_BELOW_100_IN_FOURS})00)"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY_OF_YEAR = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOUR_AND_MINUTE})"
# Four labels of 62 characters and the points between them are within the 253 of a name, and a label's 63.
_LABEL = "([A-Za-z0-9]{1,62}|[A-Za-z0-9]{1,20}(-[A-Za-z0-9]{1,20}){1,2})"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
}
OF_LIBRARY = frozenset({"duration", "email", "ipv4", "ipv6", "uri", "uuid"})
ENFORCED = tuple(sorted({*PATTERNS, *OF_LIBRARY}))
# What OpenAPI and generators of schemas say about a value without holding it to anything that a grammar could.
OF_NUMBERS = frozenset(
    {"int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64", "float", "double", "decimal"}
)
ANNOTATIONS = OF_NUMBERS | {"password", "string", "text"}
