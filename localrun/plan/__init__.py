"""How many users a machine carries: the engine as it is, behind a backend that computes nothing, in virtual time.

No second scheduler is here. What a step costs is measured (`costs.py`) or estimated (`roofline.py`), who asks for what
comes from a workload or a trace, and `search.py` looks for the highest rate that keeps its limits.
"""
