"""The daemon as a service of the user's session: systemd on Linux, launchd on macOS, the task scheduler on Windows.

`manager.py` says what is started; `systemd.py`, `launchd.py` and `windows.py` make the system's file of it, install it
and ask through the system's own commands. `windows.py` is also what the Windows task runs.
"""
