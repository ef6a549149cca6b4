"""The table of commands: name -> (module, one line of help).

`localrun --help` is printed from this table alone, so that no command's module, and nothing that it needs, is imported.
Each module has a click command called `command`.
"""

from __future__ import annotations

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("localrun.cli.run", "Chat with a model, or send it one prompt."),
    "list": ("localrun.cli.list", "List the models that can be run."),
    "ps": ("localrun.cli.ps", "List the models that are loaded."),
    "top": ("localrun.cli.top", "Watch requests, engines and the machine, live."),
    "show": ("localrun.cli.show", "Show what is known about a model."),
    "cache": ("localrun.cli.cache", "Show or clear what is kept of prompts."),
    "stop": ("localrun.cli.stop", "Unload a model, or end the daemon."),
    "serve": ("localrun.cli.serve", "Run the daemon in the foreground."),
    "bench": ("localrun.cli.bench", "Measure this or another server's speed."),
    "dev": ("localrun.cli.dev", "Tools for developing localrun."),
    "version": ("localrun.cli.version", "Print the versions of this program and of the daemon."),
}
