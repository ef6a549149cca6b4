"""The daemon's own API: `/health`, `/metrics` and `/localrun/v1/*`."""
