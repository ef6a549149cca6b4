"""The daemon's document for a fuzzer: the same, but for names that lead somewhere.

A random name of a model is refused before anything of interest happens, so requests name one that is there and of the
right kind. What would be looked for on the network, or anywhere on this machine, is left out.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.depth import DEPTH

# Ends the daemon; the others never end themselves.
LEFT_OUT = ("/localrun/v1/shutdown", "/localrun/v1/events", "/localrun/v1/logs", "/localrun/v1/traffic")
# The same row of the routes' table as another path.
SECOND_NAMES = ("/completions", "/v1/reranking", "/reranking", "/v2/rerank")
MODELS = {
    # Of a registry on this machine that refuses connections.
    "PullBody": ["localhost:1/nobody/nothing", "tiny"],
    "RerankBody": ["ranker"],
    "EmbedBody": ["bert", "tiny"],
    "EmbeddingsBody": ["bert", "tiny"],
    "LegacyEmbeddingsBody": ["bert"],
    "FimBody": ["code"],
    "InfillBody": ["code"],
    "GenerateBody": ["tiny", "code"],
    "CompletionBody": ["tiny", "code"],
    # Removed while others use them, and made again.
    "ModelBody": ["made", "copied", "tiny"],
    "CreateBody": ["made"],
}
# Paths of this machine's files.
PATHS = ("from", "source", "modelfile", "modelfile_folder")
# A long answer is no better test than a short one.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict")
# Every other one is an engine of its own, which takes longer to start than to use.
LOADS = {
    "num_ctx": [1, 3000, 2**31 - 1],
    "rope_frequency_base": [0, 1e6],
    "rope_frequency_scale": [0, 1],
    "yarn_orig_ctx": [0],
    "rope_scaling": ["yarn"],
}


def finite(document: dict[str, Any]) -> dict[str, Any]:
    """A copy without the routes that nobody comes back from, and with those that have several names under one."""
    made = copy.deepcopy(document)
    for path in LEFT_OUT + (SECOND_NAMES if DEPTH == 1 else ()):
        del made["paths"][path]
    return made


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """A copy in which names are those of models."""
    made = finite(document)
    for name, schema in made["components"]["schemas"].items():
        if not name.endswith("Body") and name != "Options":
            continue
        properties = schema["properties"]
        models = MODELS.get(name, ["tiny"])
        narrow = {"model": models, "name": models, "destination": ["copied"]}
        narrow |= {path: ["tiny", "missing"] for path in PATHS} | {length: [1, 8, 16] for length in LENGTHS} | LOADS
        for field, values in narrow.items():
            if field in properties:
                properties[field] = {"enum": values}
    return made
