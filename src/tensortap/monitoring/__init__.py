"""Watching a model while it trains: document 004's `Monitor`, and `watch`, which reduces in place.

Stands on taps, recording and selection; reporting shows what it made. Two doors: `monitor` keeps
whole outputs of chosen epochs and batches, `watch` keeps summaries of every step.
"""
