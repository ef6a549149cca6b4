"""llama.cpp's notation for grammars: the examples of its own are read, and mean what they mean there."""

from __future__ import annotations

import ctypes
import itertools
import random

import numpy as np
import pytest

from localrun.engine.native.library import native
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.sample.constraint import Constraint
from localrun.engine.sample.grammar_library import GrammarVocabulary
from localrun.wire import Grammar, GrammarKind
from tests.engine.sample.compiling import compile_grammar

EXAMPLES = {
    "sums": """root ::= (expr "=" ws term "\\n"){1,2}
        expr ::= term ([-+*/] term)*
        term ::= ident | num | "(" ws expr ")" ws
        ident ::= [a-z] [a-z0-9_]{0,3} ws
        num ::= [0-9]{1,3} ws
        ws ::= [ \\t]?
        """.replace("\n        ", "\n"),
    "lines": 'root ::= item{1,3}\n\n# no line breaks inside\nitem ::= "- " [^\\r\\n\\x0b\\u2028]{1,12} "\\n"\n',
    "kana": "root ::= kana{1,5} ([ \\t\\n] kana)?\nkana ::= [ぁ-ゟ] | [ァ-ヿ]\n",
    "quotes": 'root ::= "\\"" ( [^"\\\\] | "\\\\" ["\\\\/bfnrt] ){1,6} "\\"" | "a\\\\b/c" | "\\x41"\n',
    "choices": 'root ::= "a" . "b" (\n  "c" |\n  "d"\n)? # or nothing\n',
    "nested": 'root ::= "x" root "y" | "z"\n',
    "repeated": 'root ::= ("ab"){2,3} "c"{2} "d"{1,} "e"?\n',
    "a repetition that may be left out": 'root ::= ("a"+)? "b"',
    "repetitions of a repetition": 'root ::= ("a"+)* "b" (("c")*)* ("d"{1,3}){2}',
    "counted repetitions of a repetition": 'root ::= ("a"{1,2}){2} "z" ("b"+){2} ("c"{2,3})+',
    "what never comes": 'root ::= "a" "b"{0} c{ 0 , 0 } ("d" "e"+){0} [f]{0,1}\nc ::= "c"',
    "a repetition over lines, with a comment": 'root ::= ("a"\n "b"+ # of (b+)*\n)? | ")+" "c"',
    "one inside another": 'root ::= ((("a" "b"?)+ "c"*)? "d")*  "e"',
    "a class by numbers": 'root ::= [\\u0041-\\u005A]+ "."',
    "a class by long numbers": 'root ::= [\\U00000061-\\U0000007A]{2,4} [^\\u0061-\\u007A] "\\u0022\\x41"',
    "a repeated group of one rule's name": 'root ::= (word+)? "."\nword ::= "a" | "repeated-0"',
    "a class by the number nought, and a hyphen": 'root ::= [^\\u0000-\\u0060]{1,3} [.\\-] "x"',
    "names that others have": 'root ::= start{1,2} 1a\nstart ::= "s" 1a\n1a ::= ("a"? "b")* "c"',
    "brackets in texts and classes": 'root ::= ("(" [)*+?{]+)? "]" ("+")*',
}


def is_accepted(backend: LlamaBackend, text: str, tokens: list[int]) -> bool:
    """Whether llama.cpp's own grammar takes these tokens and then an end."""
    sampler = native.llama_sampler_init_grammar(backend._vocabulary._vocab, text.encode(), b"root")
    assert sampler
    entry = (native.llama_token_data * 1)()
    for token in (*tokens, min(backend.eog_tokens)):
        entry[0].id, entry[0].logit = token, 1.0
        array = native.llama_token_data_array(data=entry, size=1, selected=-1, sorted=False)
        native.llama_sampler_apply(sampler, ctypes.byref(array))
        if not np.isfinite(entry[0].logit):
            return False
        if token != min(backend.eog_tokens):
            native.llama_sampler_accept(sampler, token)
    native.llama_sampler_free(sampler)
    return True


@pytest.mark.parametrize("name", EXAMPLES)
def test_llama_cpp_takes_what_its_grammar_let_through(backend: LlamaBackend, name: str):
    compiled = compile_grammar(Grammar(GrammarKind.GBNF, EXAMPLES[name]), GrammarVocabulary(backend))
    n_accepted = 0
    for seed in range(20):
        picks = random.Random(seed)
        answer = Constraint(compiled, triggers=(), banned=frozenset(), clock=lambda: 0.0)
        tokens: list[int] = []
        while not answer.is_complete and len(tokens) < 60:
            token = answer.choose(lambda allowed, picks=picks: picks.choice(allowed), tries_first=False)  # type: ignore[misc]
            if token in backend.eog_tokens:
                break
            tokens.append(token)
        else:
            if len(tokens) == 60:
                continue
        assert is_accepted(backend, EXAMPLES[name], tokens)
        n_accepted += 1
    assert n_accepted > 3


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ('root ::= ("a"{1,2}){2} "z"', {"aaz": True, "aaaz": True, "aaaaz": True, "az": False, "aaaaaz": False}),
        ("root ::= ([a-z]+){2}", {"ab": True, "abc": True, "a": False}),
        ('root ::= ("a"{2,3})+ "z"', {"aaaaz": True, "aaz": True, "az": False}),
        ('root ::= "b" "a"{0} "c"', {"bc": True, "bac": False}),
        # Of a rule of characters as many as fit what follows.
        ('root ::= word "ing"\nword ::= [a-z]+', {"singing": True, "sing": True, "ing": False, "sings": False}),
        ("root ::= n n\nn ::= [0-9]+", {"12": True, "1234": True, "1": False}),
        ('root ::= ("a" | "ab") "bc"', {"abc": True, "abbc": True, "ab": False}),
        ('root ::= [a-z]* "zz" [a-z]', {"zzx": True, "zzxzzy": True, "azz": False, "zz": False}),
        ('root ::= (n "\\n")+\nn ::= [0-9] ws\nws ::= [ \\n]*', {"1\n": True, "1 \n2\n\n": True, "1": False}),
        ('root ::= line+\nline ::= [^\\n]* "\\n"?', {"ab": True, "a\nb\n": True, "": True}),
        ('root ::= "a" . "b"', {"a\nb": True, "axb": True, "ab": False}),
    ],
)
def test_it_takes_what_llama_cpp_s_grammar_takes(backend: LlamaBackend, text: str, answers: dict[str, bool]):
    matcher = compile_grammar(Grammar(GrammarKind.GBNF, text), GrammarVocabulary(backend)).matcher
    for answer, is_taken in answers.items():
        tokens = backend.tokenize(answer, parse_special=False)
        assert is_accepted(backend, text, tokens) is is_taken
        after = matcher.deep_copy()
        assert (after.try_consume_tokens(tokens) == len(tokens) and after.is_accepting()) is is_taken, answer


def random_grammar(picks: random.Random) -> str:
    """Rules of few characters, so that their texts begin and end alike."""

    def item(depth: int) -> str:
        kind = picks.random()
        if kind < 0.25:
            return picks.choice(("x", "y", "z"))
        if kind < 0.4 and depth:
            return f"({' | '.join(sequence(depth - 1) for _ in range(2))}){picks.choice(('', '?', '+', '{1,2}'))}"
        if kind < 0.6:
            return picks.choice(("[a]", "[ab]", "[^a]")) + picks.choice(("", "*", "+", "{1,2}", "?"))
        return f'"{picks.choice(("a", "b", "ab", "ba", "aab", "abb"))}"'

    def sequence(depth: int) -> str:
        return " ".join(item(depth) for _ in range(picks.randint(1, 3)))

    x = f"[ab]{picks.choice('+*')} {picks.choice(('', '[a]', chr(34) + 'b' + chr(34)))}"
    y = picks.choice(('"a"', '"a" | "ab"', "x [b]", '"b" x?'))
    return f"root ::= {sequence(2)} | {sequence(1)}\nx ::= {x}\ny ::= {y}\nz ::= {sequence(0).replace('z', 'x')}"


@pytest.mark.parametrize("seed", range(40))
def test_random_grammars_mean_what_they_mean_to_llama_cpp(backend: LlamaBackend, seed: int):
    text = random_grammar(random.Random(seed))
    matcher = compile_grammar(Grammar(GrammarKind.GBNF, text), GrammarVocabulary(backend)).matcher
    for length in range(1, 6):
        for letters in itertools.product("ab", repeat=length):
            tokens = [backend.tokenize(letter, parse_special=False)[0] for letter in letters]
            after = matcher.deep_copy()
            is_taken = after.try_consume_tokens(tokens) == len(tokens) and after.is_accepting()
            assert is_taken is is_accepted(backend, text, tokens), (text, letters)
