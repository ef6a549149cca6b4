"""The facts a user may tell about themselves, with the ways to tell, change and ask them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tiny.corpus import words
from tiny.corpus.names import made_up_word, name


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


NAME = Fact(
    "name",
    "your name",
    person,
    (
        "my name is {value}",
        "my name is {value}",
        "I am {value}",
        "I'm {value}",
        "hi, my name is {value}",
        "hello, I am {value}",
        "hi, I'm {value}",
        "hello! my name is {value}",
        "call me {value}",
        "you can call me {value}",
        "please call me {value}",
        "people call me {value}",
        "my name's {value}",
        "the name is {value}",
        "I am called {value}",
        "this is {value}",
        "{value} is my name",
        "my name is {value}.",
        "my name is {value}, what is yours?",
        "my name is {value}. nice to meet you!",
        "hi, I am {value}. how are you?",
        "hello, my name is {value}.",
        "remember my name: {value}",
        "remember that my name is {value}",
    ),
    (
        "actually, my name is {value}",
        "sorry, my name is {value}",
        "no, my name is {value}",
        "my name is {value} now",
        "I changed my name to {value}",
        "from now on call me {value}",
    ),
    (
        "Nice to meet you, {value}!",
        "Nice to meet you, {value}!",
        "Hello, {value}! Nice to meet you.",
        "Hi, {value}! What can I do for you?",
    ),
    (
        "what is my name?",
        "what's my name?",
        "what is my name?",
        "whats my name",
        "do you remember my name?",
        "do you know my name?",
        "do you still know my name?",
        "who am I?",
        "can you tell me my name?",
        "tell me my name.",
        "what did I say my name was?",
        "how am I called?",
        "what am I called?",
        "remember my name?",
        "what was my name again?",
        "my name is?",
        "have I told you my name?",
        "which name did I give you?",
        "do you remember who I am?",
    ),
    "Your name is {value}.",
)

COLOUR = favourite("colour", "colour", chosen(words.COLOURS), ("I like {value} best of all colours",), american="color")
FOOD = favourite("food", "food", chosen(words.FOODS), ("I love to eat {value}",))
ANIMAL = favourite("animal", "animal", chosen(words.ANIMALS))
GAME = favourite(
    "game", "game", chosen(("chess", "go", "tag", "poker", "football", "dominoes", "checkers", "cards"), 0.5)
)

HOBBY = Fact(
    "hobby",
    "your hobby",
    chosen(words.HOBBIES),
    ("my hobby is {value}", "my hobby is {value}.", "I like {value} in my free time", "in my free time I do {value}"),
    ("actually, my hobby is {value}", "now my hobby is {value}"),
    ("Ah, {value} sounds like fun!", "I will remember that your hobby is {value}."),
    (
        "what is my hobby?",
        "what's my hobby?",
        "what do I do in my free time?",
        "do you remember my hobby?",
        "which hobby do I have?",
        "what do I like to do?",
    ),
    "Your hobby is {value}.",
)
JOB = Fact(
    "job",
    "your job",
    chosen(words.JOBS),
    ("I work as {a_value}", "my job is {value}", "I am {a_value} by trade", "I earn my living as {a_value}"),
    ("now I work as {a_value}", "actually, I work as {a_value}"),
    ("You are {a_value}, how interesting!", "I will remember that your job is {value}."),
    (
        "what is my job?",
        "what's my job?",
        "what do I work as?",
        "what do I do for a living?",
        "do you remember my job?",
    ),
    "Your job is {value}.",
)
CITY = Fact(
    "city",
    "where you live",
    chosen(words.CITIES, capital=True),
    ("I live in {value}", "my home is in {value}", "I live in {value}.", "I am from {value}", "I come from {value}"),
    ("now I live in {value}", "I moved to {value}", "actually, I live in {value}"),
    ("I hear that {value} is a nice place!", "I will remember that you live in {value}."),
    (
        "where do I live?",
        "where am I from?",
        "which city do I live in?",
        "what city do I live in?",
        "do you remember where I live?",
        "where is my home?",
        "do you know where I come from?",
    ),
    "You live in {value}.",
)
PET = Fact(
    "pet",
    "about a pet",
    chosen(words.PETS, p_made_up=0.1),
    (
        "I have {a_value}",
        "I have {a_value} as a pet",
        "my pet is {a_value}",
        "I own {a_value}",
        "there is {a_value} at my home",
    ),
    ("now I have {a_value}", "now my pet is {a_value}"),
    ("You have {a_value}, how nice!", "I will remember that you have {a_value}."),
    (
        "what pet do I have?",
        "which pet do I have?",
        "what is my pet?",
        "what kind of pet do I have?",
        "which animal do I have at home?",
        "do you remember my pet?",
        "what animal is my pet?",
    ),
    "You have {a_value}.",
)
PET_NAME = Fact(
    "pet_name",
    "the name of your pet",
    name,
    (
        "my pet is called {value}",
        "my pet's name is {value}",
        "the name of my pet is {value}",
        "my pet is named {value}",
    ),
    ("my new pet is called {value}", "actually, my pet is called {value}"),
    ("What a lovely name for a pet, {value}!", "I will remember that your pet is called {value}."),
    (
        "what is my pet called?",
        "what is the name of my pet?",
        "what is my pet's name?",
        "what's my pet's name?",
        "how is my pet called?",
        "do you remember my pet's name?",
    ),
    "Your pet is called {value}.",
)
FRIEND = Fact(
    "friend",
    "the name of your best friend",
    name,
    (
        "my best friend is called {value}",
        "my best friend is {value}",
        "my best friend's name is {value}",
        "{value} is my best friend",
        "the name of my best friend is {value}",
    ),
    ("my new best friend is {value}", "actually, my best friend is {value}"),
    ("Say hello to {value} from me!", "I will remember that your best friend is {value}."),
    (
        "who is my best friend?",
        "what is the name of my best friend?",
        "what is my best friend called?",
        "do you remember my best friend?",
        "what's my best friend's name?",
    ),
    "Your best friend is {value}.",
)

ALL: tuple[Fact, ...] = (
    NAME,
    COLOUR,
    FOOD,
    ANIMAL,
    GAME,
    HOBBY,
    JOB,
    CITY,
    PET,
    PET_NAME,
    FRIEND,
    simple("number", "your favourite number", whole_number, "lucky number", "which number brings me luck?"),
    simple("age", "your age", lambda random: str(random.randint(3, 99)), "age", "how old am I?", "how old am i"),
    simple("word", "your secret word", chosen(words.THINGS, 0.5), "secret word", "what was the secret word?"),
    simple("sister", "the name of your sister", name, "sister's name", "what is my sister called?"),
    simple("brother", "the name of your brother", name, "brother's name", "what is my brother called?"),
)
BY_NAME: dict[str, Fact] = {fact.name: fact for fact in ALL}
