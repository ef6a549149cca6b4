"""One request on its way: its job, the stream of its answer, its record, and the registry of all."""
