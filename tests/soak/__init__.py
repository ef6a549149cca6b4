"""An hour of everything at once: `make soak MINUTES=60`. `__main__` runs it, `load` is what clients do, `watch` what is
measured meanwhile."""
