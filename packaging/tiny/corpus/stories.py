"""Small stories from a grammar, about the one creature that the user asks for. Pure.

A story has an opening, a wish or a problem, a try, help from somebody who is not an animal, and an end: some 70 to 140
tokens. Subjects are real animals and, so that the subject is copied and not guessed, made-up ones. The held-out side
is decided by (subject, adjective, place), and some real animals never occur in training.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from tiny.corpus.names import compound, made_up_word, name
from tiny.corpus.phrasing import Exchange, recased, say
from tiny.corpus.split import is_held_out
from tiny.corpus.words import ADJECTIVES, ANIMALS, COLOURS, CREATURES, FOODS, THINGS, with_article

SKILL = "stories"

HELD_OUT_ANIMALS = tuple(animal for animal in ANIMALS if is_held_out(SKILL, animal))
TRAINING_SUBJECTS = tuple(subject for subject in ANIMALS + CREATURES if subject not in HELD_OUT_ANIMALS)

PLAIN_REQUESTS = (
    "tell me a story about {subject}.",
    "tell me a story about {subject}",
    "tell me a story about {subject}, please.",
    "tell a story about {subject}.",
    "tell me a short story about {subject}.",
    "tell me a little story about {subject}.",
    "tell me a bedtime story about {subject}.",
    "tell me another story about {subject}.",
    "can you tell me a story about {subject}?",
    "could you tell me a story about {subject}?",
    "can you write a story about {subject}?",
    "do you know a story about {subject}?",
    "I want a story about {subject}.",
    "I want to hear a story about {subject}.",
    "I would like a story about {subject}.",
    "give me a story about {subject}.",
    "write a story about {subject}.",
    "write me a short story about {subject}.",
    "write a short tale about {subject}.",
    "make up a story about {subject}.",
    "a story about {subject}, please!",
    "story about {subject}",
    "let's hear a story about {subject}.",
    "now one about {subject}.",
    "please tell me the story of {subject}.",
)
FREE_REQUESTS = (
    "tell me a story.",
    "tell me another story.",
    "another story, please.",
    "one more story?",
    "I want to hear a story.",
    "write a story.",
    "can you tell me a story?",
    "a bedtime story, please.",
    "do you know any stories?",
)

PLACES = (
    "in a quiet forest",
    "near a blue lake",
    "at the edge of a small village",
    "on a windy hill",
    "in a green valley",
    "next to an old mill",
    "by the sea",
    "behind a red barn",
    "in a big garden",
    "under a tall oak tree",
    "on a little island",
    "at the foot of a mountain",
    "in the middle of a busy city",
    "beside a slow river",
    "in a house with a round door",
    "on a farm",
    "at the end of a long road",
    "in a castle with many towers",
)
OPENINGS = (
    "Once upon a time, {a_hero} lived {place}.",
    "There once was {a_hero} who lived {place}.",
    "Long ago, {a_hero} lived {place}.",
    "{A_hero} lived {place}.",
    "Far away, {place}, there lived {a_hero}.",
)
NAMINGS = ("The {subject} was called {name}.", "Its name was {name}.", "Everybody called the {subject} {name}.")
TRAITS = (
    "The {subject} loved {food} more than anything.",
    "Every morning the {subject} sang a little song.",
    "The {subject} had {a_colour} {thing} and took it everywhere.",
    "The {subject} liked to look at the stars at night.",
    "Every day the {subject} went for a long walk.",
    "The {subject} had never been far from home.",
)
PROBLEMS = (
    "One day the {subject} lost its favourite {thing}.",
    "One morning the {subject} heard a strange noise outside.",
    "One night a big storm came and the {subject} could not sleep.",
    "One day the {subject} wanted to see the other side of the hill.",
    "One winter the {subject} had nothing left to eat.",
    "One day the {subject} found an old map under a stone.",
    "One evening the {subject} felt very lonely.",
    "One day the {subject} found a golden {thing} in the grass.",
)
TRIES = (
    "The {subject} looked behind every tree, but it found nothing.",
    "The {subject} walked and walked until its feet were sore.",
    '"What shall I do?" thought the {subject}.',
    "The {subject} was a little afraid, but it went on.",
    "The {subject} sat down and thought for a long time.",
    '"I will be brave," said the {subject}.',
    "The {subject} climbed up high to see more, but there was only fog.",
)
HELPERS = (
    "an old woman",
    "a kind farmer",
    "the moon",
    "a small child",
    "the wind",
    "a friendly baker",
    "a tired soldier",
    "the night watchman",
    "a girl with a lantern",
    "a boy with a drum",
)
HELPS = (
    'Then {helper} came by and said, "Do not worry, I will help you."',
    'There the {subject} met {helper}. "Follow me," said the stranger.',
    'Then {helper} asked, "Why are you so sad?" The {subject} told the whole story.',
    "Just then {helper} showed the {subject} a secret path.",
    "In the end {helper} gave the {subject} some {food} and good advice.",
)
TURNS = (
    "Together they looked everywhere, and at last everything was well.",
    "Step by step they found the way, and the {subject} laughed with joy.",
    "The {subject} shared its {food}, and the two became friends.",
    "So the {subject} learned something new that day.",
    "And what the {subject} had been looking for was right there.",
)
ENDINGS = (
    "From that day on, the {adjective} {subject} was never lonely again.",
    "That night the {subject} slept well and dreamed of {food}.",
    "And the {subject} lived happily ever after.",
    "When the {subject} came home, it was the happiest {subject} in the world.",
    "Since then the {subject} tells this story to everybody who wants to hear it.",
    "The {subject} smiled, for it knew that it had a friend. The end.",
)


class Plot(NamedTuple):
    """What a story is about."""

    subject: str
    adjective: str
    place: str


def plot(random: Random, held_out: bool = False) -> Plot:
    """A plot from the asked side of the split."""
    while True:
        kind = random.random()
        if held_out:
            subject = random.choice(HELD_OUT_ANIMALS if kind < 0.5 else ANIMALS)
        elif kind < 0.45:
            subject = random.choice(TRAINING_SUBJECTS)
        elif kind < 0.55:
            subject = random.choice(THINGS)
        elif kind < 0.75:
            subject = compound(random)
        else:
            subject = made_up_word(random, random.choices((1, 2, 3), (3, 5, 2))[0])
        drawn = Plot(subject, random.choice(ADJECTIVES[:28]), random.choice(PLACES))
        if subject in HELD_OUT_ANIMALS:
            if held_out:
                return drawn
        elif is_held_out(SKILL, " ".join(drawn)) == held_out:
            return drawn


def story(random: Random, drawn: Plot, hero_name: str | None = None, with_adjective: bool = False) -> str:
    """The text of a story of `drawn`; the hero bears `hero_name` when one is given."""
    adjective = drawn.adjective if with_adjective or random.random() < 0.6 else ""
    hero = with_article(f"{adjective} {drawn.subject}".strip())
    if hero_name and random.random() < 0.5:
        hero, hero_name = f"{hero} named {hero_name}", None
    slots = {
        "subject": drawn.subject,
        "adjective": drawn.adjective,
        "place": drawn.place,
        "a_hero": hero,
        "A_hero": hero[0].upper() + hero[1:],
        "name": hero_name or "",
        "helper": random.choice(HELPERS),
        "food": random.choice(FOODS),
        "thing": random.choice(THINGS[:60]),
        "a_colour": with_article(random.choice(COLOURS)),
    }
    parts = [random.choice(OPENINGS)]
    if hero_name:
        parts.append(random.choice(NAMINGS))
    parts.append(random.choice(TRAITS))
    parts.append(random.choice(PROBLEMS))
    parts.extend(random.sample(TRIES, random.choice((1, 1, 2))))
    parts.extend((random.choice(HELPS), random.choice(TURNS), random.choice(ENDINGS)))
    return " ".join(parts).format(**slots)


def request(random: Random, drawn: Plot, hero_name: str | None = None, with_adjective: bool = False) -> str:
    """What a user types to get a story about the subject of `drawn`."""
    subject = f"{drawn.adjective} {drawn.subject}" if with_adjective else drawn.subject
    subject = recased(random, with_article(subject), p_lower=0.0, p_upper=0.02)
    if hero_name:
        subject += random.choice((" named ", " called ")) + hero_name
    return say(random, random.choice(PLAIN_REQUESTS), subject=subject)


def exchange(random: Random, held_out: bool = False) -> Exchange:
    """A request for a story, and the story."""
    drawn = plot(random, held_out)
    if not held_out and random.random() < 0.08:
        known = drawn._replace(subject=random.choice(TRAINING_SUBJECTS))
        return Exchange(say(random, random.choice(FREE_REQUESTS)), story(random, known))
    hero_name = name(random) if random.random() < 0.12 else None
    with_adjective = random.random() < 0.2
    return Exchange(request(random, drawn, hero_name, with_adjective), story(random, drawn, hero_name, with_adjective))
