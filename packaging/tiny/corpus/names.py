"""Given names: real ones and an open set made of random syllables, split into training and held-out names.

Pure. The open set is what makes recall a skill of copying instead of a list learned by heart.
"""

from __future__ import annotations

from random import Random

from tiny.corpus.split import draw
from tiny.corpus.words import ANY_WORDS, listed

SKILL = "names"

REAL_NAMES = listed(
    """Ada Adam Agnes Aisha Alan Albert Alex Alice Amara Amir Amy Ana Andrea Andrew Anna Anton Anya Arthur Asha Astrid
    Ava Barbara Beatrice Ben Bella Bilal Boris Brian Bruno Camille Carl Carlos Carmen Caroline Chen Chloe Chris Clara
    Claire Colin Cora Dalia Daniel Daria David Deborah Denis Diana Diego Dina Dmitri Dora Edgar Edith Eduardo Elena Eli
    Elias Elif Ella Emil Emily Emma Erik Esther Eva Evelyn Farid Fatima Felix Fiona Flora Frances Frank Freya Gabriel
    George Gina Giulia Grace Greta Gustav Hana Hannah Harold Harry Hassan Heidi Helen Henry Hiro Hugo Ian Ida Igor Ines
    Ingrid Iris Isaac Isabel Ivan Ivy Jack Jacob James Jamal Jan Jane Jasmine Jean Jenny Jin Joan Joe Johan John Jonas
    Jorge Joseph Josh Juan Judith Julia Julian June Kai Karen Karim Karl Kate Katya Kenji Kim Kofi Kurt Lara Lars Laura
    Layla Lea Leo Leon Liam Lily Lina Linda Lisa Liu Louis Lucas Lucy Luis Luna Lydia Maeve Magnus Malik Marco Margaret
    Maria Marie Mark Martha Martin Mary Mateo Matt Max Maya Mei Mia Michael Mila Milan Mina Miriam Mohamed Molly Nadia
    Naomi Natasha Nathan Nelly Nick Nico Nina Noah Noor Nora Olga Oliver Olivia Omar Oscar Otto Pablo Pamela Paul
    Pedro Peter Petra Philip Pia Priya Rachel Rafael Raj Ravi Rebecca Rita Robert Robin Rosa Rose Ruth Ryan Sally Sam
    Samira Sandra Sara Sasha Selma Sergei Silvia Simon Sofia Sonia Stella Stephen Sven Tamara Tanya Tara Theo Thomas
    Tim Tina Tobias Tom Uma Ursula Vera Victor Viola Walter Wendy Will Xavier Yara Yasmin Yuki Yusuf Zara Zoe
    Zoë José Łukasz Søren Chloé Jürgen André"""
)

ONSETS = listed(
    """b c d f g h j k l m n p r s t v w y z br cl cr dr fl fr gl gr kr pl pr sh sk sl sm sn sp st str th tr tw ch kh
    zh qu x"""
)
VOWELS = listed("a a a e e e i i i o o o u u y ae ai au ea ee ei ia ie io oa oo ou ua")
CODAS = listed("n r l s t m k d x b g p nd rk lt st ns th sh ck ll rt sk v z f")


def made_up_word(random: Random, n_syllables: int) -> str:
    """A pronounceable lower-case word, such as `brelun`."""
    parts: list[str] = []
    for index in range(n_syllables):
        if index > 0 or random.random() < 0.8:
            parts.append(random.choice(ONSETS))
        parts.append(random.choice(VOWELS))
        if random.random() < 0.35:
            parts.append(random.choice(CODAS))
    return "".join(parts)


def random_letters(random: Random) -> str:
    """Three to seven letters in any order: forces copying where spelling habits do not help."""
    return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randint(3, 7)))


def compound(random: Random) -> str:
    """Two common words, whole or cut, run together: shows every piece of a word in a new place."""
    head, tail = random.choice(ANY_WORDS), random.choice(ANY_WORDS)
    if random.random() < 0.2:
        head = head[: random.randint(2, len(head))] if len(head) > 2 else head
    if random.random() < 0.5:
        tail = tail[random.randint(0, len(tail) - 1) :]
    return head + tail


def any_name(random: Random) -> str:
    """A name from either side of the split."""
    kind = random.random()
    if kind < 0.3:
        return random.choice(REAL_NAMES)
    if kind < 0.84:
        return made_up_word(random, random.choices((1, 2, 3, 4), (2, 5, 3, 1))[0]).capitalize()
    if kind < 0.92:
        return compound(random).capitalize()
    return random_letters(random).capitalize()


def name(random: Random, held_out: bool = False) -> str:
    """A capitalised given name; with `held_out`, one that training never shows."""
    return draw(random, SKILL, held_out, any_name, key=str)
