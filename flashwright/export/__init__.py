"""Export: a kernel package in the form that others load.

`package.py` reads the package, `write.py` writes the result all at once, and each form has a file:
`hub.py` (a Hugging Face `kernels` package), `flashinfer.py` (Definition and Solution of
FlashInfer-Bench), `header.py` (source, launch plan and a C++ host example). `launch.py` is copied
into the first two: it launches a kernel with PyTorch and the CUDA driver alone.
"""
