"""Replicas on fake engines, and the folder of small models that the server's tests have."""

from __future__ import annotations

from tests.server.conftest import home, models_dir, running, settings, small_model, submit

__all__ = ["home", "models_dir", "running", "settings", "small_model", "submit"]
