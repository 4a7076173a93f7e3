"""FlexAttention's score_mod and mask_mod as TL.

`attention.py` is the API, `capture.py` records a function and turns it into an expression,
`aten.py` has the rule of each operator, `compare.py` and `trial.py` compare with the function
itself, `fallback.py` is the same by PyTorch. `backend.py` is `torch.compile`'s backend: `graphs.py`
reads Dynamo's graph, `lists.py` compares a BlockMask
with its function, `blocks.py` makes the kernel's lists of it. `sdpa.py` stands behind PyTorch's own
attention.
"""
