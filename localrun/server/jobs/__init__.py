"""One request on its way: its prompt, its job, its record, and the registry of all."""
