"""Models that are already compiled: one file a runtime, one interface for all of them.

A `Program` is a compiled model that can say which layers it has, how it knows their names, and run
with taps on some of them. `tap.py` turns any program into a tap like that of an eager module.
"""
