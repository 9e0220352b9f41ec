"""Training: objectives, the step, the loop, and checkpoints that are whole.

`objective` has the protocol; `imitate` and `heads` implement it.
"""
