"""Triton implementations of the functions of `flashspark.kernels`; imported on a device that runs them alone."""
