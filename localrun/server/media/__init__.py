"""Pictures and sound of requests: from a client's bytes to files of pixels and samples that an engine takes."""
