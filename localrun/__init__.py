"""localrun: a local inference runtime. See `README.md` for use and `localrun/__main__.py` for the way in."""

__version__ = "0.1.0"
