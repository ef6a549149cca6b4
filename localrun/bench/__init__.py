"""Measuring servers from outside, ours and others'. README.md in this folder says what is measured and how to read it.

Nothing here imports the daemon or the engine: servers under measurement are child processes, or somebody else's.
"""
