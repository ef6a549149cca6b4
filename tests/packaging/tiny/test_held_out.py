"""The measuring itself: right answers pass, wrong ones fail, and the cases are the same every time."""

from __future__ import annotations

import re
from random import Random

from tiny import held_out
from tiny.corpus import names, stories
from tiny.corpus.split import is_held_out
from tiny.held_out import SKILLS, Reply, Skill


def skill(name: str) -> Skill:
    return next(skill for skill in SKILLS if skill.name.startswith(name))


def reply(text: str, n_tokens: int = 80, finish_reason: str = "stop") -> Reply:
    return Reply(text, n_tokens, finish_reason)


def test_the_same_seed_gives_the_same_cases() -> None:
    for each in SKILLS:
        first = [case.turns for case in held_out.cases(each, 10)]
        assert first == [case.turns for case in held_out.cases(each, 10)]
        assert first != [case.turns for case in held_out.cases(each, 10, seed=1)]


def test_a_sum_is_judged_by_its_last_number() -> None:
    for case in held_out.cases(skill("one-digit"), 50):
        digits = [int(d) for d in re.findall(r"\d+", case.turns[0])]
        if len(digits) == 2:
            total = sum(digits)
            assert case.is_right(reply(f"{digits[0]} + {digits[1]} = {total}."))
            assert not case.is_right(reply(f"{digits[0]} + {digits[1]} = {total + 1}."))
            assert not case.is_right(reply("I do not know."))


def test_a_name_is_told_first_and_asked_last() -> None:
    case = held_out.recall_case(Random(1))
    assert len(case.turns) == 3
    told = [word for word in re.findall(r"\w+", case.turns[0]) if word[0].isupper()]
    name = next(word for word in told if case.is_right(reply(f"Your name is {word}.")))
    assert is_held_out(names.SKILL, name)
    assert name not in case.turns[2]
    assert not case.is_right(reply("You have not told me your name yet."))
    assert not case.is_right(reply(f"Your name is {name}x."))


def test_long_recall_has_twenty_turns() -> None:
    assert len(held_out.cases(skill("name recalled in turn 20"), 1)[0].turns) == 20


def test_a_repeat_has_to_be_exact() -> None:
    for case in held_out.cases(skill("repeat"), 50):
        words = case.turns[0].split(":", 1)[1].strip()
        assert 1 <= len(words.split()) <= 8
        assert case.is_right(reply(words))
        assert not case.is_right(reply(words + " and"))
        assert not case.is_right(reply(words.upper()))


def test_a_story_has_to_stay_on_its_animal_and_end() -> None:
    random = Random(2)
    plot = stories.plot(random, held_out=True)._replace(subject="fox")
    text = stories.story(random, plot)
    assert held_out.is_story_about("fox", reply(text))
    assert not held_out.is_story_about("owl", reply(text))
    assert not held_out.is_story_about("fox", reply(text + " The owl laughed."))
    assert not held_out.is_story_about("fox", reply(text, n_tokens=59))
    assert not held_out.is_story_about("fox", reply(text, finish_reason="length"))
