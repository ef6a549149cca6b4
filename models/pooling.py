"""What a model is for, by its file: text, embeddings, or ranking; and how it makes one vector of a text's tokens.

Pure. The names of poolings are those of llama.cpp. Where a file says nothing, a model that reads in both directions
takes the mean, and one that reads from left to right its last token, which alone has seen the whole text.

Does not: compute anything, or know what localrun offers (the API modules do).
"""

from __future__ import annotations

from typing import Final

from localrun.models.header import Header

MEAN, CLS, LAST, RANK = "mean", "cls", "last", "rank"

# enum llama_pooling_type; 0 is none.
_BY_NUMBER = {1: MEAN, 2: CLS, 3: LAST, 4: RANK}

# Architectures that llama.cpp runs without a KV cache, a whole text at once.
ENCODERS: Final = frozenset(
    {
        *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "modern-bert"),
        *("eurobert", "gemma-embedding", "t5encoder"),
    }
)


def is_bidirectional(header: Header) -> bool:
    """Whether a token sees the tokens after it, so that a text must be computed in one piece."""
    return header.architecture in ENCODERS or header.metadata.get(f"{header.architecture}.attention.causal") is False


def pooling(header: Header) -> str:
    """`MEAN`, `CLS`, `LAST` or `RANK`."""
    stated = _BY_NUMBER.get(header.count("pooling_type"))
    return stated or (MEAN if is_bidirectional(header) else LAST)


def generates(header: Header) -> bool:
    """Whether it continues a text. A file that names a pooling was made for vectors, whatever its architecture."""
    return not is_bidirectional(header) and header.count("pooling_type") not in _BY_NUMBER


def is_reranker(header: Header) -> bool:
    """Whether it scores how well a document answers a query."""
    return pooling(header) == RANK


def n_dimensions(header: Header) -> int:
    """Length of its vectors."""
    return header.count("embedding_length_out") or header.count("dense_3_feat_out") or header.n_embd
