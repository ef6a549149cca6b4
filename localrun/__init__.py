"""localrun: a local inference runtime. See `README.md` for use and `localrun/__main__.py` for the way in."""

import time

if time.get_clock_info("monotonic").resolution > 0.001:
    # Windows before Python 3.13: in steps of 15.6 ms a token would take no time, and rates would be nonsense.
    time.monotonic = time.perf_counter

__version__ = "0.1.0"
