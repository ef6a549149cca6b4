"""Measuring a running server from outside: `streams.py` is the client, `ceiling.py` compares with the
bare loop, `divergence.py` compares answers alone and in company."""
