"""Double of modules/modelloader.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
"""


def load_spandrel_model(path, *, device, prefer_half=False, dtype=None, expected_architecture=None):
    import spandrel

    descriptor = spandrel.ModelLoader(device=device).load_from_file(str(path))
    if prefer_half and descriptor.supports_half:
        descriptor.model.half()
    if dtype:
        descriptor.model.to(dtype=dtype)
    descriptor.model.eval()
    return descriptor
