"""Words that look like English, for the tokenizer of synthesized models.

Pure and deterministic: the same arguments give the same words on every machine. A short list of real words comes first,
because prompts are made of them; the rest is built from syllables.
"""

from __future__ import annotations

from collections.abc import Iterator

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
