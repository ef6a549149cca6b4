"""Model files: names, headers, the store, memory estimates, the built-in model, and synthesized ones.

Imports nothing of localrun but `config` and `errors`.
"""
