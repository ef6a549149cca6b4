"""Model files with random weights. `synthesize.synthesize` is the way in."""
