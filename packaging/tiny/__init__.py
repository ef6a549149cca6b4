"""How the built-in model `tiny` is made: its text, its network, its training and its scores.

Not in the wheel: localrun needs the file alone. Run from the folder `packaging/` (`python -m tiny.train --out FILE`),
with the `train` extra installed.
"""
