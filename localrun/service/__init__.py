"""The daemon as a service of the user's session: systemd on Linux, launchd on macOS, the task scheduler on Windows.

`plan.py` says what is started; `unit.py`, `agent.py` and `task.py` are the three files made of it, pure functions;
`systemd.py`, `launchd.py` and `windows.py` install and ask through the system's own commands. `logged.py` is how the
task starts the daemon.
"""
