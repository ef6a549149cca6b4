"""Where models come from: each source turns a name into a plan (`download.plan.RemotePlan`) of files to fetch.

Does not: choose among quantizations (`quant_choice` does), or write manifests.
"""
