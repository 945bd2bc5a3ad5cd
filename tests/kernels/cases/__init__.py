"""Kernel tests proper. They run under ``TRITON_INTERPRET=1`` on the CPU, or natively on a CUDA device."""
