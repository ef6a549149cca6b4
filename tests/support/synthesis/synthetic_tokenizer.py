"""A byte-level BPE vocabulary of any size, made in code: for synthesized models.

Pure and deterministic. Ids in order: three control tokens, 256 bytes, merges learned from English-like words, filler
words up to the wanted size. A short list of real words comes first, because prompts are made of them; the rest is built
from syllables. Any bytes can be tokenized; English text takes about three bytes a token. Filler tokens are never
produced by the tokenizer, only by a model, and each has its own printable text.

Does not: tokenize (llama.cpp does that with what stands in the file).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

# In no strict order of frequency, but frequent ones first: a word's place decides how early it is merged.
COMMON_WORDS = (
    "the", "and", "a", "of", "to", "in", "is", "it", "you", "that", "for", "on", "with", "was", "as", "are", "be",
    "this", "not", "or", "by", "at", "from", "but", "have", "has", "had", "he", "she", "they", "we", "his", "her",
    "their", "my", "your", "our", "me", "him", "them", "us", "an", "one", "all", "can", "will", "would", "could",
    "should", "may", "do", "does", "did", "if", "then", "than", "so", "when", "what", "which", "who", "how", "why",
    "where", "there", "here", "no", "yes", "only", "also", "just", "very", "more", "most", "some", "any", "each",
    "every", "other", "same", "such", "into", "over", "under", "after", "before", "between", "about", "again",
    "because", "while", "until", "through", "say", "said", "tell", "told", "ask", "answer", "write", "read", "make",
    "made", "give", "gave", "take", "took", "find", "found", "know", "think", "want", "need", "use", "used", "using",
    "work", "help", "go", "went", "come", "see", "look", "show", "try", "run", "stop", "start", "begin", "end", "keep",
    "let", "put", "call", "like", "play", "please", "thank", "hello", "good", "new", "old", "long", "short", "big",
    "small", "great", "little", "first", "last", "next", "right", "wrong", "true", "false", "two", "three", "four",
    "five", "six", "seven", "eight", "nine", "ten", "time", "day", "year", "man", "woman", "child", "people", "friend",
    "name", "word", "line", "text", "story", "question", "example", "number", "list", "place", "house", "home", "city",
    "country", "world", "water", "light", "tree", "river", "sea", "sun", "moon", "star", "animal", "cat", "dog",
    "bird", "fish", "fox", "hand", "head", "eye", "thing", "way", "part", "point", "case", "fact", "idea", "problem",
    "reason", "result", "change", "order", "state", "system", "user", "assistant", "model", "language", "computer",
    "program", "code", "function", "class", "return", "import", "value", "error", "file", "data", "memory", "token",
    "prompt", "server", "client", "request", "response", "machine", "process", "message", "key", "table", "page",
    "letter", "sentence", "paragraph", "summary", "explain", "describe", "translate", "quick", "brown", "lazy", "jump",
    "walk", "speak", "learn", "teach", "build", "open",
)  # fmt: skip

_ONSETS = ("b", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st", "tr", "ch", "sh", "pl")
_VOWELS = ("a", "e", "i", "o", "u")
_SYLLABLES = tuple(onset + vowel for vowel in _VOWELS for onset in _ONSETS)
_ENDINGS = ("", "n", "r", "s", "t", "ng", "ly", "ed", "tion", "ment")

# Coprime to 100 ** 3, so that counting up visits every three-syllable word once, in an order that looks random.
_STRIDE = 387_421


def made_up_words(n_words: int) -> tuple[str, ...]:
    """Two-syllable words with English endings, e.g. "tarining"."""
    return tuple(
        _SYLLABLES[i * 37 % 100] + _SYLLABLES[i * i * 7 % 89] + _ENDINGS[i // 3 % len(_ENDINGS)]
        for i in range(1, n_words + 1)
    )


def filler_words() -> Iterator[str]:
    """A million distinct three-syllable words."""
    for i in range(100**3):
        scattered = i * _STRIDE % 100**3
        yield (_SYLLABLES[scattered // 10_000] + _SYLLABLES[scattered // 100 % 100] + _SYLLABLES[scattered % 100])


END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Values of enum llama_token_type.
_TYPE_NORMAL = 1
_TYPE_CONTROL = 3

_MAX_MERGES = 4096
_N_MADE_UP_WORDS = 1500

Pair = tuple[str, str]


class Vocabulary(NamedTuple):
    """What goes into `tokenizer.ggml.*`. `merges` are pairs as "left right", best first."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]


@cache
def make_vocabulary(n_vocab: int) -> Vocabulary:
    """A vocabulary of exactly `n_vocab` tokens, at least 512. Half of what bytes leave are merges, at most 4,096. It is
    everybody's, and learned once."""
    byte_tokens = list(byte_alphabet())
    n_merges = min(_MAX_MERGES, (n_vocab - len(CONTROL_TOKENS) - len(byte_tokens)) // 2)
    merges = _learn_merges(_weighted_words(), n_merges)
    tokens = [*CONTROL_TOKENS, *byte_tokens, *(left + right for left, right in merges)]
    known = set(tokens)
    for word in filler_words():
        if len(tokens) == n_vocab:
            break
        token = "Ġ" + word
        if token not in known:
            tokens.append(token)
    n_control = len(CONTROL_TOKENS)
    types = [_TYPE_CONTROL] * n_control + [_TYPE_NORMAL] * (len(tokens) - n_control)
    return Vocabulary(tokens, types, [f"{left} {right}" for left, right in merges])


def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte value, as GPT-2's byte-level BPE maps them: printable Latin-1
    characters stand for themselves, the others for code points from 256 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    n_shifted = 0
    characters = []
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + n_shifted))
            n_shifted += 1
    return tuple(characters)


def _weighted_words() -> Counter[str]:
    words: Counter[str] = Counter()
    for rank, word in enumerate(COMMON_WORDS):
        weight = 100_000 // (rank + 10)
        words["Ġ" + word] += weight
        words[word] += weight // 8
        words[word.capitalize()] += weight // 16
    for word in made_up_words(_N_MADE_UP_WORDS):
        words["Ġ" + word] += 12
    return words


def _learn_merges(words: Counter[str], n_merges: int) -> list[Pair]:
    """The `n_merges` most frequent pairs, each counted after the merges before it. Ties go to the smaller pair.

    Counts are kept up to date per merge, and the best pair comes from a heap whose stale entries are skipped: the work
    follows the words that change, not the whole corpus.
    """
    spelled = [list(word) for word in words]
    weights = list(words.values())
    counts: Counter[Pair] = Counter()
    found_in: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, symbols in enumerate(spelled):
        for pair in pairwise(symbols):
            counts[pair] += weights[index]
            found_in[pair].add(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    made: set[str] = set()
    while heap and len(merges) < n_merges:
        negative_count, pair = heapq.heappop(heap)
        if counts[pair] != -negative_count or negative_count == 0:
            continue
        changed: set[Pair] = set()
        for index in sorted(found_in.pop(pair)):
            before = spelled[index]
            after = _merged(before, pair)
            for old in pairwise(before):
                counts[old] -= weights[index]
                changed.add(old)
            for new in pairwise(after):
                counts[new] += weights[index]
                found_in[new].add(index)
                changed.add(new)
            spelled[index] = after
        for other in changed:
            heapq.heappush(heap, (-counts[other], other))
        if pair[0] + pair[1] not in made:
            # Two ways to the same text would be two ids with one text, which a vocabulary cannot have.
            made.add(pair[0] + pair[1])
            merges.append(pair)
    return merges


def _merged(symbols: list[str], pair: Pair) -> list[str]:
    result: list[str] = []
    i = 0
    while i < len(symbols):
        if i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == pair:
            result.append(pair[0] + pair[1])
            i += 2
        else:
            result.append(symbols[i])
            i += 1
    return result
