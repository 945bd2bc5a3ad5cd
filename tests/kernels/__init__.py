"""The Triton kernels of the stages: interpreted without a GPU, native with one."""
