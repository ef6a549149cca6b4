"""Who may use a daemon, and how much of it: keys, quotas, the record of what was used, certificates.

Files that the command line and the daemon share, and what both must agree on. Does not: know HTTP.
"""
