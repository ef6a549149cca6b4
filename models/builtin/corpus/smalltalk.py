"""Small talk: greetings, thanks, jokes, who the model is. Pure; the texts are in `intents`."""

from __future__ import annotations

from random import Random

from localrun.models.builtin.corpus.exchange import Exchange
from localrun.models.builtin.corpus.intents import INTENTS, JOKE_REQUESTS, JOKES
from localrun.models.builtin.corpus.phrasing import say


def exchange(random: Random) -> Exchange:
    """One small-talk turn; every intent is equally likely, jokes a little more."""
    if random.random() < 0.07:
        return Exchange(say(random, random.choice(JOKE_REQUESTS)), random.choice(JOKES))
    phrasings, answers = random.choice(INTENTS)
    if random.random() < 0.25:
        # The first intents are what a conversation nearly always begins or ends with.
        phrasings, answers = INTENTS[random.choice((0, 4, 9, 10, 11, 12))]
    return Exchange(say(random, random.choice(phrasings)), random.choice(answers))
