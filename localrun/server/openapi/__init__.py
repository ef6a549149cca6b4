"""What the daemon says of itself: `/openapi.json`, and the pages of `/docs`."""
