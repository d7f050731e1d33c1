"""A wave-level executor of AMD code objects (RDNA3, RDNA4, CDNA2, CDNA3) on the CPU, with numpy.

`executor.run` is the entry; `launch.CodeLaunch` is a `Launch` of ops/base.py on top of it. Decoding
is tinygrad's; semantics are written here from AMD's ISA documents. What is not known raises.
"""
