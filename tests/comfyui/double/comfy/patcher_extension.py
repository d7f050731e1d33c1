"""Double of comfy/patcher_extension.py (Comfy-Org/ComfyUI a125cd84): functions around a call."""


class WrappersMP:
    APPLY_MODEL = "apply_model"
    CALC_COND_BATCH = "calc_cond_batch"
    DIFFUSION_MODEL = "diffusion_model"


def get_all_wrappers(wrapper_type, transformer_options, is_model_options=False):
    named = transformer_options.get("wrappers", {}).get(wrapper_type, {})
    return [wrapper for wrappers in named.values() for wrapper in wrappers]


class WrapperExecutor:
    def __init__(self, original, class_obj, wrappers, idx):
        self.original, self.class_obj = original, class_obj
        self.wrappers, self.idx = list(wrappers), idx

    @classmethod
    def new_class_executor(cls, original, class_obj, wrappers, idx=0):
        return cls(original, class_obj, wrappers, idx)

    @classmethod
    def new_executor(cls, original, wrappers, idx=0):
        return cls(original, None, wrappers, idx)

    def __call__(self, *args, **kwargs):
        following = WrapperExecutor(self.original, self.class_obj, self.wrappers, self.idx + 1)
        return following.execute(*args, **kwargs)

    def execute(self, *args, **kwargs):
        if self.idx < len(self.wrappers):
            return self.wrappers[self.idx](self, *args, **kwargs)
        return self.original(*args, **kwargs)
