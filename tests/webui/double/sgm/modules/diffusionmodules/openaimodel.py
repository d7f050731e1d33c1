"""Double of sgm/modules/diffusionmodules/openaimodel.py: only its name `th`.

The surface was read in Stability-AI/generative-models 45c443b.
"""

import torch as th

__all__ = ["th"]
