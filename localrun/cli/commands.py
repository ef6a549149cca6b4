"""The table of commands: name -> (module, one line of help).

`localrun --help` is printed from this table alone, so that no command's module, and nothing that it needs, is imported.
Each module has a click command called `command`.
"""

from __future__ import annotations

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("localrun.cli.run", "Chat with a model, or send it one prompt."),
    "pull": ("localrun.cli.pull", "Download a model, or go on with a download."),
    "search": ("localrun.cli.search", "Look for models to pull."),
    "list": ("localrun.cli.list", "List the models that can be run."),
    "ps": ("localrun.cli.ps", "List the models that are loaded."),
    "top": ("localrun.cli.top", "Watch requests, engines and the machine, live."),
    "show": ("localrun.cli.show", "Show what is known about a model."),
    "create": ("localrun.cli.create", "Make a model from another one, or from a file."),
    "cp": ("localrun.cli.cp", "Give a model a second name."),
    "rm": ("localrun.cli.rm", "Remove models."),
    "push": ("localrun.cli.push", "Say how to share a model."),
    "gc": ("localrun.cli.gc", "Delete files that no model needs."),
    "cache": ("localrun.cli.cache", "Show or clear what is kept of prompts."),
    "stop": ("localrun.cli.stop", "Unload a model, or end the daemon."),
    "serve": ("localrun.cli.serve", "Run the daemon in the foreground."),
    "service": ("localrun.cli.service", "Have the daemon start with your session."),
    "doctor": ("localrun.cli.doctor", "Check this machine, the build and the files."),
    "completion": ("localrun.cli.completion", "Print what a shell needs to complete commands."),
    "bench": ("localrun.cli.bench", "Measure this or another server's speed."),
    "dev": ("localrun.cli.dev", "Tools for developing localrun."),
    "version": ("localrun.cli.version", "Print the versions of this program and of the daemon."),
}
