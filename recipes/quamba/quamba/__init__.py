"""A Mamba language model with the shape of quamba-130m, and its modes as real computations.

`mode_config` says what each mode means and imports nothing; `target.build` is the target; the
rest computes.
"""
