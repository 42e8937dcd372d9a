"""The command line: one file a verb, each of which parses, calls and prints.

No module here imports torch, rich or matplotlib at its top, so that `--help` is quick.
"""
