"""What answers: localrun, and the llama.cpp that it computes with."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from localrun import __version__


@cache
def llama_cpp_version() -> str:
    """Of the bindings, which is all that is known of the library without loading it; empty if that is nothing."""
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return ""


@cache
def build_name() -> str:
    """Begins with `b` as llama-server's does. It is another one wherever the same seed may give another answer, which
    is what OpenAI's clients read `system_fingerprint` for."""
    return f"b{llama_cpp_version()}-localrun-{__version__}"
