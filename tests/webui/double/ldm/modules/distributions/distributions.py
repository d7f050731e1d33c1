"""Double of ldm/modules/distributions/distributions.py.

The surface was read in Stability-AI/stablediffusion cf1d67a.
The noise of `sample` is the same each time, so that generations can be compared.
"""

import torch


class DiagonalGaussianDistribution:
    def __init__(self, parameters, deterministic=False):
        self.mean, logvar = torch.chunk(parameters, 2, dim=1)
        self.std = torch.exp(0.5 * torch.clamp(logvar, -30.0, 20.0))

    def sample(self):
        noise = torch.randn(self.mean.shape, generator=torch.Generator().manual_seed(0))
        return self.mean + self.std * noise.to(self.mean)

    def mode(self):
        return self.mean
