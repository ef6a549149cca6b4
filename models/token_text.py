"""The text of single vocabulary entries, such as the BOS and EOS tokens that chat templates print.

Does not: tokenize, or keep what it read (see `vocabulary`).
"""

from __future__ import annotations

from localrun.models.header import Header
from localrun.models.vocabulary import ArraySummary, read_token


def special_token_text(header: Header, key: str) -> str:
    """The text of the token whose id is the metadata entry `key` ("tokenizer.ggml.eos_token_id").

    Empty when the file names no such token. Raises BadModelFile when the file is gone or was changed in place.
    """
    token = header.metadata.get(key)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(token, int) or not isinstance(tokens, ArraySummary) or tokens.type != "str":
        return ""
    return read_token(header.path, tokens, token) if 0 <= token < tokens.length else ""
