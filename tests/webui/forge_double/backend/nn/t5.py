"""Double of backend/nn/t5.py, which asks for torch's attention whatever was chosen.

The surface was read in lllyasviel/stable-diffusion-webui-forge dfdcbab6.
"""

from backend.attention import attention_pytorch as attention_function

__all__ = ["attention_function"]
