"""Who computes next, in which order, and how much. Pure."""
