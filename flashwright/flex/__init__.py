"""FlexAttention's score_mod and mask_mod as TL.

`capture.py` records a function and turns it into an expression, `aten.py` has the rule of each
operator, `compare.py` checks the result against the function.
"""
