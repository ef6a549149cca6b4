"""GGUF files, before any C code sees them: what a header says, and whether this llama.cpp can load it.

`reader.read_header` is the way in; it gives a `header.Header`.
"""
