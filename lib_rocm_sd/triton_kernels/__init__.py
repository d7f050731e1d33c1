"""Kernels of ours in Triton, for who has it (requirements/triton.txt, or the extra `triton`).

Nothing imports these modules but the variants that Performance asks.
"""
