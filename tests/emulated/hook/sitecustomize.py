"""Every Python process that has this folder on its path plays the system that PYTHON_EMULATED names."""

import os

if os.environ.get("PYTHON_EMULATED"):
    import other_system

    other_system.play(os.environ["PYTHON_EMULATED"])
