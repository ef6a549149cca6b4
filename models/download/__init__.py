"""Where models come from, and how: each source (`huggingface`, `ollama`, `neighbours`) turns a name into a plan of what
to fetch, and `fetch.fetch` transfers files in parallel ranges, resumed after any kind of end, verified before they have
a name.

`plan` has the types. `partial` also finds what abandoned downloads left behind.

Does not: choose among quantizations (`quant_choice` does), or write manifests.
"""
