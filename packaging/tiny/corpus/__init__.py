"""The text that `tiny` is trained on: one generator for each skill, all pure functions of a `random.Random`.

`conversation.messages` mixes them; `split` keeps the held-out side of every skill apart. Does not know tokens.
"""
