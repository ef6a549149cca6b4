"""The engine process: one model, one llama.cpp context, one step loop.

Read in this order: `process.py` (the way in), `engine.py` (the hot loop), `scheduler.py` (who gets how many tokens),
`cache/` (which tokens are where), `llama.py` (the only code that touches llama.cpp).
"""

import os

# Before numpy is imported: its library would start a thread for each processor, which spin for a tenth of a second each
# and then wait for work that never comes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
