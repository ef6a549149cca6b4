"""HTTP as raw ASGI: limits before anything else, then one `Exchange` per request, and each API family's errors."""
