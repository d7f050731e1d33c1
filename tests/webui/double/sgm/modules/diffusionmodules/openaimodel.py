"""Double of sgm/modules/diffusionmodules/openaimodel.py: only its name `th`.

The surface was read in Stability-AI/generative-models 0ad7de9.
"""

import torch as th

__all__ = ["th"]
