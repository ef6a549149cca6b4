"""Tools for the chat: MCP servers that the person names in `tui.toml`, what they offer to a model, and what may run.

Used by the terminal interface and by `localrun run --tools`, in their process; the daemon knows nothing of it. Read
`toolbox.py` first: it is what both talk to.
"""
