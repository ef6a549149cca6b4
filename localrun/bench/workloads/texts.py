"""Texts for the workloads that drafts may help or must not harm: Python files, lists and records from a seed.

Made and not stored, so that no server has seen the text of another round. All are plain ASCII.
"""

from __future__ import annotations

import random
import re
from typing import NamedTuple

_NOUNS = (
    "account", "airport", "barrel", "battery", "bridge", "cable", "camera", "candle", "carpet", "ceiling", "channel",
    "clock", "corner", "cotton", "engine", "fabric", "filter", "garden", "hammer", "harbor", "invoice", "island",
    "kettle", "ladder", "lesson", "letter", "marble", "market", "meadow", "mirror", "needle", "orchard", "packet",
    "paper", "pencil", "pillow", "planet", "pocket", "project", "ribbon", "river", "rocket", "saddle", "signal",
    "silver", "spring", "station", "stone", "summer", "ticket", "timber", "tunnel", "valley", "vessel", "window",
)  # fmt: skip
_ADJECTIVES = (
    "amber", "bitter", "broken", "bright", "calm", "clever", "cold", "dusty", "early", "empty", "gentle", "golden",
    "heavy", "hollow", "humble", "narrow", "noisy", "orange", "plain", "polite", "quiet", "rapid", "rough", "round",
    "secret", "sharp", "silent", "simple", "steady", "sudden", "tiny", "violet", "warm", "wide", "wooden", "yellow",
)  # fmt: skip
_CITIES = ("Bergen", "Cork", "Delft", "Evora", "Graz", "Lucca", "Malmo", "Porto", "Tartu", "Turku", "Vilnius", "York")


class SourceFile(NamedTuple):
    """`head` is what comes before the first definition; `names` are those of the definitions."""

    head: str
    text: str
    names: list[str]


def source_file(chosen: random.Random) -> SourceFile:
    """A Python file of some 160 lines in which no definition is like another: small models lose their way among those
    that are."""
    nouns = chosen.sample(_NOUNS, 3 * len(_FUNCTIONS))
    head = f'"""The {chosen.choice(_ADJECTIVES)} {nouns[0]} report."""\n\nimport os\nimport re\n'
    parts, names = [head], []
    for function in chosen.sample(_FUNCTIONS, len(_FUNCTIONS)):
        words = {"noun": nouns.pop(), "other": nouns.pop(), "third": nouns.pop()}
        parts.append(function.format(**words, adjective=chosen.choice(_ADJECTIVES), n=chosen.randrange(2, 90)))
        names += _DEFINED.findall(parts[-1])[:1]
    return SourceFile(head, "\n\n".join(parts), names)


_DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)

_FUNCTIONS = (
    '''\
def keep_{noun}(rows, limit={n}):
    """The rows whose {noun} is {adjective}, but not more than the limit."""
    found = []
    for row in rows:
        if row["{other}"] is None:
            continue
        if row["{noun}"] == "{adjective}":
            found.append(row)
    return found[:limit]
''',
    '''\
def count_{noun}(items):
    """How often each {adjective} {noun} occurs."""
    counts = {{}}
    for item in items:
        value = item.{noun} or item.{other}
        counts[value] = counts.get(value, 0) + 1
    if len(counts) > {n}:
        raise ValueError("too many kinds: " + str(len(counts)))
    return counts
''',
    '''\
def read_{noun}(path, encoding="utf-8"):
    """The lines of the {other} file without its comments."""
    with open(path, encoding=encoding) as file:
        for number, line in enumerate(file, start=1):
            if line.startswith("#") or number > {n}:
                print("skipped", number)
            else:
                yield line.rstrip()
''',
    '''\
def join_{noun}(left, right):
    """Two tables in one, by their {other}."""
    by_{other} = {{each["{other}"]: each for each in right}}
    joined = [{{**each, **by_{other}[each["{other}"]]}} for each in left]
    return sorted(joined, key=lambda each: each["{third}"], reverse=True)
''',
    '''\
class {noun}Error(Exception):
    """Raised when the {adjective} {other} does not fit."""

    def __init__(self, {other}, reason="{third}"):
        super().__init__(f"{{{other}}}: {{reason}}")
        self.{other} = {other}
        self.code = {n}
''',
    """\
def mean_{noun}(values, scale={n}.0):
    total = sum(values) * scale
    if not values:
        return None
    assert total >= 0, "a {adjective} {noun} cannot be negative"
    return round(total / len(values), 2)
""",
    """\
def split_{noun}(text):
    pattern = re.compile(r"{other}=([a-z]+);{third}=([0-9]+)")
    pairs = pattern.findall(text.lower())
    while pairs and pairs[-1][1] == "{n}":
        pairs.pop()
    return dict(pairs)
""",
    '''\
def save_{noun}(folder, content):
    """Write it beside the old one, then put it in its place."""
    target = os.path.join(folder, "{adjective}-{other}.txt")
    temporary = target + ".{third}"
    with open(temporary, "w") as stream:
        stream.write(content * {n})
    os.replace(temporary, target)
''',
    """\
async def wait_for_{noun}(queue, timeout={n}):
    try:
        message = await queue.get(timeout)
    except TimeoutError:
        log.warning("no {adjective} {noun} within %d seconds", timeout)
        return "{other}"
    finally:
        queue.task_done()
    return message.{third}
""",
    """\
def draw_{noun}(canvas, x, y, color="{adjective}"):
    canvas.move_to(x, y)
    for angle in range(0, 360, {n}):
        canvas.line_to(x + {other}.cos(angle), y + {other}.sin(angle))
    canvas.close_path()
    canvas.fill(color, opacity=0.{n})
    return canvas.label("{third}")
""",
    """\
@cached
def {noun}_settings(name):
    default = {{"{other}": True, "{third}": {n}, "theme": "{adjective}"}}
    override = os.environ.get(name.upper(), "")
    for part in override.split(","):
        key, _, value = part.partition(":")
        default[key] = value.strip()
    return default
""",
    '''\
def send_{noun}(session, address):
    """Deliver a {adjective} {noun} and try again when the {other} is busy."""
    attempts = 0
    while attempts < {n}:
        response = session.post(address, json={{"kind": "{third}"}})
        if response.status_code != 503:
            break
        attempts += 1
    return response.json()
''',
    """\
def plan_{noun}(start, days):
    import calendar

    for day in calendar.Calendar().itermonthdays(start.year, {n} % 12 + 1):
        if day in days:
            yield start.replace(day=day), "{adjective} {other}"
    print(f"planned {{len(days)}} times: {third}")
""",
    '''\
def compress_{noun}(block: bytes) -> bytes:
    """The {adjective} form: a run of one byte becomes its length and the byte."""
    packed, previous, length = bytearray(), block[0], 1
    for current in block[1:]:
        if current == previous and length < {n}:
            length += 1
        else:
            packed += bytes((length, previous))
            previous, length = current, 1
    return bytes(packed)
''',
    """\
@property
def is_{noun}(self):
    if self._{other} is None and not self.{third}:
        self._{other} = self.load("{adjective}", depth={n})
    return self._{other}
""",
    """\
def main(arguments):
    parser = argparse.ArgumentParser(description="{adjective} {noun}")
    parser.add_argument("--{other}", type=int, default={n})
    parser.add_argument("--{third}", action="store_true")
    given = parser.parse_args(arguments)
    if given.{third} is False:
        parser.error("--{third} is needed here")
    sys.exit(given.{other})
""",
)


def listing(chosen: random.Random) -> str:
    """Things to do, one a line, in sentences of which no two are alike, for the same reason."""
    nouns = chosen.sample(_NOUNS, 2 * len(_TASKS))
    lines = []
    for task in chosen.sample(_TASKS, len(_TASKS)):
        words = {"adjective": chosen.choice(_ADJECTIVES), "city": chosen.choice(_CITIES), "n": chosen.randrange(2, 90)}
        lines.append(f"- {task.format(noun=nouns.pop(), other=nouns.pop(), **words)}\n")
    return "".join(lines)


_TASKS = (
    "Buy {n} pieces of {noun} before the shop closes",
    "Ask Martha whether the {adjective} {noun} has arrived in {city}",
    "Repair the {noun} next to the {other}",
    "Never leave a {adjective} {noun} in the rain",
    "Send John the list of every {noun} and {other}",
    "Paint the kitchen door {adjective} again",
    "Call the office in {city} about the {noun}",
    "Measure how heavy the {other} is without its {noun}",
    "Book a train to {city} for {n} people",
    "Throw away what is left of the {noun}",
    "Learn the song about the {adjective} {other}",
    "Water all {n} plants behind the {noun}",
    "Return two books on {other} to the library",
    "Write a letter that explains the {noun} to Aunt Rose",
    "Find out who took our {adjective} {noun} last winter",
    "Clean the {other} with warm water and soap",
    "Invite everybody from {city} to dinner on Friday",
    "Pay {n} dollars for the {adjective} {noun}",
    "Draw a map from the {noun} to the {other}",
    "Do not forget the key to the {noun} room",
    "Compare the {noun} with the one in {city}",
    "Take a photo of the {adjective} {other} at night",
)


def records(chosen: random.Random) -> tuple[str, dict[str, object]]:
    """Records as lines of text, and the schema of a list of as many objects."""
    lines = [
        f"{noun}: {chosen.choice(_ADJECTIVES)}, {chosen.randrange(10, 990)} pieces, from {chosen.choice(_CITIES)}\n"
        for noun in chosen.sample(_NOUNS, N_RECORDS)
    ]
    text: dict[str, object] = {"type": "string", "maxLength": 16}
    fields = {"name": text, "kind": text, "pieces": {"type": "integer", "minimum": 0, "maximum": 999}, "city": text}
    one = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return "".join(lines), {"type": "array", "items": one, "minItems": N_RECORDS, "maxItems": N_RECORDS}


N_RECORDS = 8


def topic(chosen: random.Random) -> str:
    """What a story may be about."""
    first, second = chosen.sample(_NOUNS, 2)
    return f"a {chosen.choice(_ADJECTIVES)} {first} and a {second} in {chosen.choice(_CITIES)}"
