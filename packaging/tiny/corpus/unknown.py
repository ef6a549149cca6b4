"""Questions that a model of this size cannot answer, and a modest answer. Pure.

The questions come from a wide grammar with made-up words in it, so that anything unfamiliar falls on this side.
"""

from __future__ import annotations

from random import Random

from tiny.corpus.names import made_up_word, name, random_letters
from tiny.corpus.phrasing import Exchange, phrases, say
from tiny.corpus.words import (
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

QUESTIONS = phrases(
    """
what is the capital of {place}? | who is {person}? | who was {person}? | who is the president of {place}? |
who wrote {thing} and {thing2}? | who invented the {thing}? | when was the {thing} invented? |
when was {person} born? | how many {thing}s are in a {thing2}? | how many people live in {place}? |
how far is it to {place}? | how tall is {person}? | how does a {thing} work? | how do I {verb} a {thing}? |
how do I make {food}? | how do you cook {food}? | what is a {thing}? | what is {thing}? | what is {word}? |
what does {word} mean? | what is the meaning of {word}? | what colour is a {thing}? |
what is the difference between a {thing} and a {thing2}? | why is the {thing} {colour}? | why do {animal}s {verb}? |
why is the sky blue? | can a {animal} {verb}? | do {animal}s {verb}? | is a {thing} bigger than a {thing2}? |
where is {place}? | where can I buy a {thing}? | where does the {animal} live? | which {thing} is the best? |
what should I {verb} today? | what should I cook with {food}? | give me a recipe for {food}. |
write a poem about {thing}s. | write a poem | write an essay about {place}. | write a letter to {person}. |
write a program that can {verb}. | write a Python function to {verb} a list. | write a function in {language}. |
fix this code: {code} | {code} | explain {word} to me. | explain this {language} code: {code} |
explain the theory of {word}. | explain quantum physics. | translate {word} into {tongue}. |
translate "{sentence}" into {tongue}. | how do you say {word} in {tongue}? | summarize this text: {sentence} |
summarize the book about {thing}s. | what is the news about {place}? | what happened in {year}? |
who won the match in {year}? | what is the population of {place}? | what is the price of {food}? |
what is the best {job} in {place}? | can you recommend a {thing}? | can you {verb} a {thing}? |
could you {verb} the {thing} for me? | plan a trip to {place}. | what is the square root of {big}? |
what is {big} divided by {big2}? | is {big} a prime number? | convert {big} miles to metres. |
what is the speed of light? | how old is {person}? | what is {person} famous for? | what do {job}s do? |
what does a {job} do? | how much does a {thing} cost? | what is the tallest {place2}? | what is the longest river? |
what is the largest {animal}? | spell {word}. | what rhymes with {word}? | what is the opposite of {adjective}? |
what is another word for {adjective}? | {sentence} | {sentence}? | the {adjective} {thing} {verb}s. |
my {thing} is {adjective}, what can I do? | I think that the {thing} is {adjective}. |
I bought a {adjective} {thing} yesterday. | we went to {place} last year. | tell me about {person}. |
tell me about {place}. | tell me the history of {place}. | tell me a fact about {word}. |
what do you think about {word}? | do you know {person}? | have you been to {place}? | have you seen the {thing}? |
did {person} {verb}? | does {person} like {food}? | will the {thing} {verb}? | should I {verb} or {verb2}? |
is {food} healthy? | are {animal}s {adjective}? | how {adjective} is a {thing}? | {word} | {letters} |
{word} {word2} {letters} | play {word}. | open {word}. | search for {thing}s. | show me a picture of a {animal}. |
draw a {animal}. | draw me a {thing}. | what is the email of {person}? | call {person}. |
send a message to {person}. | set an alarm for {big}. | turn on the {thing}. | what is 1 divided by 0? |
who won the world cup? | what is the stock price of {word}? | act as a {job}. | pretend to be a {animal}.
"""
)

BIG_SUMS = phrases(
    """
what is {big} + {big2}? | {big} + {big2} | {big} plus {big2} | add {big} and {big2}. | what is {big} - {small}? |
{big} - {big2} | what is {small} - {small2}? | {small} - {small2} | what is {small} minus {small2}? |
what is {small} * {small2}? | {small} * {small2} | {small} x {small2} | what is {small} times {small2}? |
{big} * {big2} | what is {big} times {small}? | how much is {big} + {small}? | what is {small} + {big}? |
what is {small} / {small2}? | {small} / {small2} | what is {small} + {small2} + {small3}? | compute {big} + {big2}. |
calculate {big} * {small}. | what is {big} minus {big2}?
"""
)

CODE = phrases(
    """
print({word}) | def {word}(): return {big} | x = {big}; y = x | SELECT * FROM {word}; | for i in range({big}): |
{{"{word}": {big}}} | import {word} | int {word} = {big}; | <{word}>{big}</{word}> | ls -la {word} |
fn {word}() {{}} | if {word}: pass
"""
)

LANGUAGES = phrases(
    """
Python | Rust | C | Java | JavaScript | Go | SQL | Bash | Haskell | Ruby
"""
)

TONGUES = phrases(
    """
German | French | Spanish | Italian | Dutch | Chinese | Japanese | Latin | Polish | Turkish
"""
)

COUNTRIES = phrases(
    """
France | Germany | Spain | Italy | Japan | China | India | Brazil | Canada | Norway | Sweden | Poland | Egypt |
Kenya | Peru | Chile | Turkey | Greece | Portugal | Ireland | Iceland | Mexico | Cuba | Austria | Belgium | Denmark |
Finland
"""
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
