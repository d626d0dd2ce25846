"""The fused kernel: the streamed pass with Triton kernels on a GPU."""
