"""Transfer of large files over HTTP: parallel ranges, resumed after any kind of end, verified before they are named.

`fetch.fetch` is the way in; `plan` has its types. `partial` also finds what abandoned downloads left behind.

Does not: know what a model is, or where models come from.
"""
