"""One kind of fact that a user may tell, and the forms that most kinds share. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from localrun.models.builtin.corpus.names import made_up_word, name


@dataclass(frozen=True)
class Fact:
    """One kind of fact. Slots: `{value}`, and `{a_value}` with its article.

    `tellings[0]` can stand inside a longer sentence.
    """

    name: str
    described: str
    draw: Callable[[Random], str]
    tellings: tuple[str, ...]
    changes: tuple[str, ...]
    replies: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


def person(random: Random) -> str:
    """A given name, sometimes with a family name."""
    if random.random() < 0.12:
        return f"{name(random)} {made_up_word(random, 2).capitalize()}"
    return name(random)


def chosen(values: tuple[str, ...], p_made_up: float = 0.3, capital: bool = False) -> Callable[[Random], str]:
    """Draws from `values`, or a made-up word, so that answers are copied and not guessed."""

    def draw(random: Random) -> str:
        if random.random() >= p_made_up:
            return random.choice(values)
        word = made_up_word(random, random.choice((2, 2, 3)))
        return word.capitalize() if capital else word

    return draw


def whole_number(random: Random) -> str:
    """A number of one to three digits."""
    return str(random.randint(0, random.choice((9, 99, 99, 999))))


def favourite(
    key: str, noun: str, draw: Callable[[Random], str], extra_tellings: tuple[str, ...] = (), american: str = ""
) -> Fact:
    """A `favourite {noun}` fact; `american` is the noun's other spelling."""
    other = american or noun
    return Fact(
        key,
        f"your favourite {noun}",
        draw,
        (
            f"my favourite {noun} is {{value}}",
            f"my favourite {noun} is {{value}}",
            f"my favorite {other} is {{value}}",
            f"my favorite {other} is {{value}}.",
            f"{{value}} is my favourite {noun}",
            f"remember that my favourite {noun} is {{value}}",
            f"the {noun} I like best is {{value}}",
            *extra_tellings,
        ),
        (
            f"actually, my favourite {noun} is {{value}}",
            f"now my favourite {noun} is {{value}}",
            f"my favorite {other} is {{value}} now",
        ),
        (
            f"I will remember that your favourite {noun} is {{value}}.",
            "Ah, {value}! A good choice, I will remember it.",
            f"Good to know: your favourite {noun} is {{value}}.",
        ),
        (
            f"what is my favourite {noun}?",
            f"what's my favourite {noun}?",
            f"what is my favorite {other}?",
            f"what's my favorite {other}?",
            f"which {noun} do I like best?",
            f"which {noun} do I like most?",
            f"do you remember my favourite {noun}?",
            f"do you know my favorite {other}?",
            f"tell me my favourite {noun}.",
            f"what {noun} do I like?",
            f"what was my favourite {noun} again?",
        ),
        f"Your favourite {noun} is {{value}}.",
    )


def simple(key: str, described: str, draw: Callable[[Random], str], subject: str, *extra: str) -> Fact:
    """A fact told as `my {subject} is ...`; `extra` are more questions."""
    return Fact(
        key,
        described,
        draw,
        (
            f"my {subject} is {{value}}",
            f"my {subject} is {{value}}.",
            f"remember that my {subject} is {{value}}",
            f"{{value}} is my {subject}",
        ),
        (f"actually, my {subject} is {{value}}", f"no, my {subject} is {{value}}", f"now my {subject} is {{value}}"),
        (f"I will remember that your {subject} is {{value}}.", f"Got it: your {subject} is {{value}}."),
        (
            f"what is my {subject}?",
            f"what's my {subject}?",
            f"do you remember my {subject}?",
            f"do you know my {subject}?",
            f"tell me my {subject}.",
            f"what was my {subject} again?",
            *extra,
        ),
        f"Your {subject} is {{value}}.",
    )
