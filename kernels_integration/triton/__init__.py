"""The kernels in Triton, for NVIDIA GPUs of compute capability 9.0.

Every module holds kernels of one subject and plain functions that launch them: tensors in, results into
tensors that the caller provides, no wait for the host, shapes that depend on no length. So each can be part
of a CUDA graph. On a CPU they run in Triton's interpreter. Importing a module here imports triton;
nothing else in the project does.
"""
