"""What runs in processes with Ray: a node's part of it, replicas as Serve starts them, and who asks Serve for a
door."""
