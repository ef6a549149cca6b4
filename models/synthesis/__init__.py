"""Model files with random weights, for tests, benchmarks, and the probe of the native library's kernels.

`synthesize.synthesize` is the way in.
"""
