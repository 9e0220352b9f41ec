"""Language models: what turns tokens into laws, and how they are read and kept.

`base` has the protocol, `transformer` the model of every family, `toy` one that
can be enumerated, `load` finds any of them by name.
"""
