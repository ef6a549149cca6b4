"""Programs that measure or report, each a process of its own."""
