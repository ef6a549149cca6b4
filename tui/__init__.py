"""The terminal interface: a chat and a monitor, both HTTP clients of the daemon.

Runs in the process of the person who looks at it. It shows only what the daemon's API tells, so that whoever prefers a
script to a screen can have the same numbers.

Does not: start the daemon (the CLI does), keep history on disk, or measure anything itself.
"""
