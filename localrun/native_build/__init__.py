"""How llama-cpp-python is built for a machine: the one place that decides it, for the Makefile, install.sh, the
Dockerfile, the formula and `doctor`. `python3 -m localrun.native_build --help` says how to ask.

It runs before anything is installed, so it needs only the standard library, and of ours `cpu_features.py`.
"""
