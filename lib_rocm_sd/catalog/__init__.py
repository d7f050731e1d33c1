"""What Stable Diffusion asks of the ops, as problems, by widths and sizes alone; no torch.

Which kernels are compiled at a start, tried, estimated and executed follows from these and from the
ops' variants.
"""
