"""The engine process: one model, one llama.cpp context, one step loop.

Read in this order: `process.py` (the way in), `engine.py` (the hot loop), `scheduler.py` (who gets how many tokens),
`cache/` (which tokens are where), `llama.py` (the only code that touches llama.cpp).
"""
