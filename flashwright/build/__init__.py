"""From CUDA source to a cubin and a kernel package: toolchain, nvcc, cache, loader."""
