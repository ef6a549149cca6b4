"""Which tokens are where: in cells, in memory, on disk."""
