r"""Which unit does an answer of mathematics end with?  A list of units and currencies, without conversion.

    split_unit("12 km per hour") == split_unit("12kph") == ("12", "km/hour")
    split_unit("12 sq. ft.") == ("12", "foot^2"), split_unit("12 dozen") == ("12 dozen", "")
The words behind a number that are not a unit of the list are left where they are.
"""

from __future__ import annotations

import re
from functools import lru_cache

LINES = """
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre|inch in inches|foot ft feet
yard yd|mile mi|acre|hectare ha|ml milliliter millilitre|l L liter litre|gallon gal|quart qt|pint pt|cup|tablespoon
teaspoon|mg milligram|g gram|kg kilogram|lb pound|ounce oz|ton|s sec second|min minute|hour h hr|day|week|month
year yr|° deg degree|°C|°F|rad radian|dollar $ usd|cent ¢ penny pennies|euro € eur|£ gbp|¥ yen|unit|person people
mile/hour mph|km/hour kph kmh
"""
UNITS = {spelled: line.split()[0] for line in re.split(r"[|\n]", LINES) for spelled in line.split()}
PLURALS = {f"{spelled}s": unit for spelled, unit in UNITS.items() if spelled.isalpha() and len(spelled) > 1}
NAMES = frozenset(name for name in [*UNITS, *PLURALS] if len(name) > 1 and name.isalpha()) | {"sq", "cu", "square"}
BEFORE, AFTER = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}, {"squared": 2, "cubed": 3, "^2": 2, "^3": 3}
LONGEST = 60  # characters
STARTS = re.compile(r"(?<![A-Za-z\\])[A-Za-z°$€£¥¢]")
CURRENCY = re.compile(r"[-+]? ?(?:US ?)?([$€£¥]|(?:USD|EUR|GBP)(?![A-Za-z]))")
WORD = re.compile(r"\^ ?\{? ?[23] ?\}?|[A-Za-z]+|°[CF]?|\S")


@lru_cache(maxsize=1 << 12)
def unit_of(text: str) -> str:
    """Return the unit that is all of a text, in one spelling of it; nothing where it is not in the list."""
    result, power, unit_next = "", 0, True
    for word in WORD.findall(text.replace(".", " ")):
        word = re.sub("[ {}]", "", word)
        if word in ("/", "per") and result and not unit_next:
            result, unit_next = f"{result}/", True
        elif word in BEFORE and unit_next and not power:
            power = BEFORE[word]
        elif word in AFTER and not unit_next and result[-1] not in "23":
            result = f"{result}^{AFTER[word]}"
        else:
            lower = word.casefold() if len(word) > 1 and word.isalpha() else word
            unit = UNITS.get(lower) or PLURALS.get(lower)
            if unit is None or not unit_next:
                return ""
            result, power, unit_next = result + unit + (f"^{power}" if power else ""), 0, False
    return "" if unit_next else result


@lru_cache(maxsize=1 << 12)
def split_unit(text: str, shortest: int = 1) -> tuple[str, str]:
    """Return a plain text without its unit, and the unit; a text without a known one, or one this short, as it is."""
    start = max(0, len(text) - LONGEST)
    for match in STARTS.finditer(text, start):
        rest, end = text[: match.start()], text[match.start() :]
        if rest.strip() and (shortest == 1 or (len(end) >= shortest and rest.endswith(" "))) and (unit := unit_of(end)):
            return rest.rstrip(), unit
    return text, ""


def agree(one: str, other: str) -> bool:
    """Return whether two units are the same; one that is left out agrees with any."""
    return not one or not other or one == other
