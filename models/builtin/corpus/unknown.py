"""Questions that a model of this size cannot answer, and a modest answer. Pure.

The questions (in `unknown_questions`) come from a wide grammar with made-up words in it, so that anything unfamiliar
falls on this side.
"""

from __future__ import annotations

from random import Random

from localrun.models.builtin.corpus.exchange import Exchange
from localrun.models.builtin.corpus.names import made_up_word, name, random_letters
from localrun.models.builtin.corpus.phrasing import say
from localrun.models.builtin.corpus.unknown_questions import (
    BIG_SUMS,
    CODE,
    COUNTRIES,
    LANGUAGES,
    QUESTIONS,
    TONGUES,
)
from localrun.models.builtin.corpus.words import (
    ADJECTIVES,
    ANIMALS,
    ANY_WORDS,
    CITIES,
    COLOURS,
    FOODS,
    JOBS,
    PLACES,
    THINGS,
    VERBS,
)

ANSWERS = (
    "I do not know that. I am a tiny model, a larger one can help you.",
    "Sorry, I am only a tiny model and do not know that.",
)
BIG_SUM_ANSWER = "I am a tiny model: I can only add two one-digit numbers."


def any_term(random: Random) -> str:
    """A common word, or a made-up one."""
    return random.choice(ANY_WORDS) if random.random() < 0.5 else made_up_word(random, random.choice((1, 2, 3)))


def place(random: Random) -> str:
    """A country, a city, or a made-up place."""
    kind = random.random()
    if kind < 0.35:
        return random.choice(COUNTRIES)
    return random.choice(CITIES) if kind < 0.6 else made_up_word(random, random.choice((2, 3))).capitalize()


def sentence(random: Random) -> str:
    """Words in any order; now and then very many of them."""
    n_words = random.randint(2, 9) if random.random() < 0.9 else random.randint(20, 80)
    return " ".join(any_term(random) for _ in range(n_words))


def slots(random: Random) -> dict[str, str]:
    """One value for every slot of the grammar."""
    return {
        "place": place(random),
        "place2": random.choice(PLACES),
        "person": f"{name(random)} {made_up_word(random, 2).capitalize()}" if random.random() < 0.5 else name(random),
        "thing": any_term(random) if random.random() < 0.2 else random.choice(THINGS),
        "thing2": random.choice(THINGS),
        "verb": random.choice(VERBS),
        "verb2": random.choice(VERBS),
        "food": random.choice(FOODS),
        "animal": random.choice(ANIMALS),
        "adjective": random.choice(ADJECTIVES),
        "colour": random.choice(COLOURS),
        "job": random.choice(JOBS),
        "word": any_term(random),
        "word2": any_term(random),
        "letters": random_letters(random),
        "language": random.choice(LANGUAGES),
        "tongue": random.choice(TONGUES),
        "sentence": sentence(random),
        "year": str(random.randint(1500, 2030)),
        "big": str(random.randint(10, 9999)),
        "big2": str(random.randint(10, 999)),
        "small": str(random.randint(0, 9)),
        "small2": str(random.randint(0, 9)),
        "small3": str(random.randint(0, 9)),
    }


def exchange(random: Random) -> Exchange:
    """A question outside of what the model learned, and its modest answer."""
    values = slots(random)
    values["code"] = random.choice(CODE).format(**values)
    if random.random() < 0.15:
        return Exchange(say(random, random.choice(BIG_SUMS), **values), BIG_SUM_ANSWER)
    return Exchange(say(random, random.choice(QUESTIONS), **values), random.choices(ANSWERS, (3, 1))[0])
