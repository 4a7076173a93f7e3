"""From CUDA source to a cubin: the tools, the compiler's run, what was built before."""
