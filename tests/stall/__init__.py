"""Whatever one request holds, nobody else waits for it: every field of every operation, grown."""
