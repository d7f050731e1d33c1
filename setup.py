"""What `pip install .` installs: the library, and the kernels' sources within it."""

from setuptools import find_packages, setup

KERNELS = "lib_rocm_sd.kernels"
"""No package to import: a folder, where lib_rocm_sd/arch.py looks for it."""

setup(
    packages=[*find_packages(include=["lib_rocm_sd", "lib_rocm_sd.*"]), KERNELS],
    package_dir={KERNELS: "kernels"},
    package_data={
        KERNELS: ["*.hip", "*.json", "*/*.h", "tuned/*/*.json"],
        "lib_rocm_sd.hosts.comfyui": ["web/*.js"],
        "lib_rocm_sd.lab.suite": ["page.*"],
    },
)
