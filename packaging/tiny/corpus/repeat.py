"""`repeat after me: ...`: up to eight words copied exactly. Pure.

Words are a mix of common and made-up ones, so that the model learns to copy instead of to guess. The held-out side is
decided by the whole phrase, and by each common word of `HELD_OUT_WORDS`, which training never asks to repeat.
"""

from __future__ import annotations

from random import Random

from tiny.corpus.names import any_name, compound, made_up_word, random_letters
from tiny.corpus.phrasing import Exchange, say
from tiny.corpus.split import is_held_out
from tiny.corpus.words import ANY_WORDS, listed

SKILL = "repeat"
MAX_WORDS = 8
P_FEW_DIFFERENT = 0.06
"""Share of phrases such as `no no yes no`, where copying has to count."""

ODD_WORDS = listed(
    """don't it's I'm we'll e-mail C++ 3.14 10:30 50% $5 @home #1 a/b x=1 <b> (ok) [x] foo_bar naïve café über señor
    你好 привет γειά 😀 👍 ❤ → … hello-world ok? well... A.B. 1,000 v2 127.0.0.1 localrun GGUF llama.cpp JSON HTTP"""
)

HELD_OUT_WORDS = tuple(word for word in ANY_WORDS if is_held_out(SKILL, word))
TRAINING_WORDS = tuple(word for word in ANY_WORDS if not is_held_out(SKILL, word))

PHRASINGS = (
    "repeat after me: {words}",
    "repeat after me: {words}",
    "repeat after me: {words}",
    "repeat after me, {words}",
    "repeat after me {words}",
    "repeat this: {words}",
    "repeat: {words}",
    "please repeat: {words}",
    "please repeat after me: {words}",
    "can you repeat this: {words}",
    "can you repeat after me: {words}",
    "repeat the following: {words}",
    "repeat these words: {words}",
    "repeat exactly: {words}",
    "say after me: {words}",
    "say: {words}",
    "say this: {words}",
    "say exactly this: {words}",
    "echo: {words}",
    "copy this: {words}",
    'repeat after me: "{words}"',
    'repeat "{words}"',
    'say "{words}"',
    "repeat after me:\n{words}",
)


def training_word(random: Random) -> str:
    """A word to repeat that is not held out: common, made up, a name, or a few digits."""
    while True:
        word = any_word(random)
        if word.lower() not in HELD_OUT_WORDS:
            return word


def any_word(random: Random) -> str:
    """A word from the training side of the list, or a made-up one, which may by chance be a held-out word."""
    kind = random.random()
    if kind < 0.38:
        return random.choice(TRAINING_WORDS)
    if kind < 0.66:
        return compound(random)
    if kind < 0.84:
        return made_up_word(random, random.choices((1, 2, 3), (4, 5, 2))[0])
    if kind < 0.89:
        return any_name(random)
    if kind < 0.95:
        return random_letters(random)
    if kind < 0.98:
        return random.choice(ODD_WORDS)
    return str(random.randint(0, 999))


def held_out_word(random: Random) -> str:
    """A common word that training never asks to repeat (two in three), or one that it may."""
    return random.choice(HELD_OUT_WORDS if random.random() < 0.67 else TRAINING_WORDS)


def phrase(random: Random, n_words: int, held_out: bool = False) -> str:
    """`n_words` words joined by blanks, on the asked side of the split."""
    while True:
        if held_out:
            words = [held_out_word(random) for _ in range(n_words)]
            if n_words == 1 and words[0] not in HELD_OUT_WORDS:
                continue
        else:
            words = [training_word(random) for _ in range(n_words)]
            if random.random() < P_FEW_DIFFERENT:
                words = random.choices(words[: random.randint(1, 3)], k=n_words)
        text = " ".join(words)
        if n_words == 1 or is_held_out(SKILL, text) == held_out:
            return text


def styled(random: Random, text: str) -> str:
    """The phrase as some users would type it; whatever this gives is what must come back."""
    style = random.random()
    if style < 0.12:
        text = text[0].upper() + text[1:]
    elif style < 0.17:
        text = text.title()
    elif style < 0.2:
        text = text.upper()
    if random.random() < 0.1:
        text += random.choice(".!?")
    elif random.random() < 0.06:
        text = text.replace(" ", ", ")
    return text


def exchange(random: Random) -> Exchange:
    """A phrase of one to eight words and the same phrase as the answer."""
    n_words = random.choices(range(1, MAX_WORDS + 1), (4, 3, 3, 3, 3, 4, 4, 5))[0]
    words = styled(random, phrase(random, n_words))
    return Exchange(say(random, random.choice(PHRASINGS), words=words), words)
