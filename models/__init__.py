"""Model files: names and the catalogue, what is here and what can be pulled, what fits into memory, the built-in model.

`gguf/` reads headers, `storage/` is what lies on this machine, `download/` brings more. Imports nothing of localrun
but `config` and `errors`.
"""
