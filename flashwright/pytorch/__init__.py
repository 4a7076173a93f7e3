"""PyTorch: a kernel package as a torch operator.

`operator.py` registers the operator and loads the kernel, `signature.py` is its schema with the
shapes, `rules.py` what autograd, autocast and vmap do, `reference.py` its result on CPU tensors.
PyTorch is optional: only modules of this folder import it at their top, and nothing imports them
before the user asks for an operator.
"""
