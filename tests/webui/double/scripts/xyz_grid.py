"""Double of scripts/xyz_grid.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
The list of axes that extensions add to, and how its cells are made; one axis instead of three.
"""

from copy import copy

from modules import scripts
from modules.processing import process_images


def format_value_add_label(p, opt, x):
    return f"{opt.label}: {x}"


class AxisOption:
    def __init__(
        self,
        label,
        type,
        apply,
        format_value=format_value_add_label,
        confirm=None,
        cost=0.0,
        choices=None,
        prepare=None,
    ):
        self.label = label
        self.type = type
        self.apply = apply
        self.format_value = format_value
        self.confirm = confirm
        self.cost = cost
        self.prepare = prepare
        self.choices = choices


class AxisOptionTxt2Img(AxisOption):
    is_img2img = False


axis_options = [
    AxisOption("Nothing", str, lambda p, x, xs: None),
    AxisOptionTxt2Img("Sampler", str, lambda p, x, xs: None),
]


class Script(scripts.Script):
    def title(self):
        return "X/Y/Z plot"

    def ui(self, is_img2img):
        self.current_axis_options = [
            x for x in axis_options if type(x) is AxisOption or x.is_img2img == is_img2img
        ]
        return []

    def run(self, p, label, values):
        """A cell for each value; labels and infotexts of all cells."""
        (axis,) = [x for x in self.current_axis_options if x.label == label]
        values = [axis.type(x) for x in values]
        if axis.confirm:
            axis.confirm(p, values)
        made = []
        for value in values:
            cell = copy(p)
            axis.apply(cell, value, values)
            made.append((axis.format_value(p, axis, value), process_images(cell)))
        return made
