"""`localrun doctor`: looks at this machine, the build, the files and the settings, and says what to do about each.

`examine.py` runs the checks in order. Each module looks at one thing and yields `Finding`s; what depends on nothing but
its arguments is a pure function of them. Nothing is sent anywhere, and nothing changed: only the verdict about kernels
is kept, in a cache folder that exists.
"""
