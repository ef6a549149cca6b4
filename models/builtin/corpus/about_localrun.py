"""Questions about localrun itself. Pure; the texts are in `topics`."""

from __future__ import annotations

from random import Random

from localrun.models.builtin.corpus.exchange import Exchange
from localrun.models.builtin.corpus.phrasing import say
from localrun.models.builtin.corpus.topics import HOW_TO_FORMS, HOW_TOS, QUESTIONS


def exchange(random: Random) -> Exchange:
    """A question about localrun, and its answer."""
    if random.random() < 0.5:
        tasks, answers = random.choice(HOW_TOS)
        return Exchange(say(random, random.choice(HOW_TO_FORMS).replace("{task}", random.choice(tasks))), answers[0])
    questions, answers = random.choice(QUESTIONS)
    return Exchange(say(random, random.choice(questions)), answers[0])
