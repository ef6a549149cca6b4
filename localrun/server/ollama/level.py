"""The release of Ollama whose API this one follows. Clients parse it as three bare numbers and compare it with the
release that brought a feature they use; Modelfiles say which one a model needs.
"""

from __future__ import annotations

OLLAMA_API_LEVEL = "0.33.0"
