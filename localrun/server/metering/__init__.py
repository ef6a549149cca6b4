"""Numbers about requests and engines: windows, Prometheus metrics and snapshots."""
