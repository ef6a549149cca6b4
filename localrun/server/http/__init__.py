"""HTTP as raw ASGI: limits before anything else, then one `Exchange` per request. Knows no API family."""
