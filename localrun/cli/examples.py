"""Examples at the end of each command's help, and so in the pages that are made of it."""

from __future__ import annotations

# Of the program itself under the empty name.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "localrun                                  # the chat",
        'localrun run tiny "Tell me a story"       # one answer',
        "localrun pull qwen3.5:4b                  # a real model",
    ),
    "run": (
        'localrun run qwen3.5:4b "Why is the sky blue?"',
        'localrun run qwen3.5:4b "What is this?" photo.jpg',
        'git diff | localrun run ./model.gguf "Explain this"',
        'localrun run "Why is the sky blue?"  # the last model',
    ),
    "batch": (
        "localrun batch run requests.jsonl --out answers.jsonl",
        "localrun batch list",
    ),
    "search": (
        "localrun search                   # the whole catalogue",
        "localrun search coder 7b",
    ),
    "pull": (
        "localrun pull qwen3.5:4b",
        "localrun pull Qwen/Qwen3-8B-GGUF:Q4_K_M",
    ),
    "list": (
        "localrun list",
        "localrun list --json | jq -r '.[].name'",
    ),
    "show": (
        "localrun show tiny",
        "localrun show qwen3.5:4b --fit      # does it fit here?",
        "localrun show tiny --modelfile > Modelfile",
    ),
    "create": (
        "localrun create mine --from ./model.gguf",
        "localrun create pirate -f Modelfile",
        "localrun create small --from big -q q4_K_M",
    ),
    "cp": ("localrun cp qwen3.5:4b gpt-4o",),
    "rm": ("localrun rm qwen3.5:4b mine",),
    "gc": (
        "localrun gc",
        "localrun gc --all",
    ),
    "ps": (
        "localrun ps",
        "localrun ps --json",
    ),
    "stop": (
        "localrun stop qwen3.5:4b",
        "localrun stop --daemon",
    ),
    "logs": (
        "localrun logs -n 200",
        "localrun logs -f",
    ),
    "cache": (
        "localrun cache",
        "localrun cache clear --disk",
    ),
    "serve": (
        "localrun serve",
        "localrun serve --port 8080 --slots 4",
        "localrun serve --host 0.0.0.0       # for your network",
    ),
    "service": (
        "localrun service install",
        "localrun service status",
        "localrun service logs",
    ),
    "top": (
        "localrun top",
        "localrun top --once",
        "localrun top --record monday.jsonl",
    ),
    "bench": (
        "localrun bench decode --streams 1,4",
        "localrun bench stall",
    ),
    "usage": (
        "localrun usage --by model",
        "localrun usage --by day --days 7",
    ),
    "key": (
        "localrun key create --name laptop --rate 60/min",
        "localrun key list",
        "localrun key revoke laptop",
    ),
    "hosts": (
        "localrun hosts",
        "localrun hosts trust studio.local",
        "localrun --host studio.local list",
    ),
    "doctor": (
        "localrun doctor",
        "localrun doctor --deep",
    ),
    "version": ("localrun version --json",),
}


def epilog(command: str) -> str | None:
    """For click, which is told not to wrap it; None for a command without examples."""
    examples = EXAMPLES.get(command)
    return None if examples is None else "\n".join(("\b", "Examples:", *(f"  {line}" for line in examples)))
