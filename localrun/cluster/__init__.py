"""Several machines as one: doors, which clients talk to, and engine replicas, which compute for them.

A door is the ordinary daemon. To it a replica is one more engine: `wire_child.py` stands where its own process would,
and `replica.py` is the other end.
"""
