"""Two recordings side by side: align the layers, judge each, say where they part.

`compare` is the door. `align` decides what is compared with what, `judge` what a difference means,
`results` holds the answer.
"""
