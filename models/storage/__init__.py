"""Where models lie on this machine, and what is written there: blobs, manifests, files of the hub's cache, and what
other programs keep.

`store.Store` is the way in. Names are given and taken by `localrun.models.naming`.
"""
