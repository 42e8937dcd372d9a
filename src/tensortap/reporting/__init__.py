"""What people look at: tables in the terminal, one layer in detail, plots, progress.

Each part first gathers what there is to say as plain data (the same that `--json` prints) and then
renders it. rich and matplotlib are imported when something is rendered.
"""
