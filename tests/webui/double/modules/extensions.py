"""Double of modules/extensions.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
Which extensions there are, and whose a file is.
"""

import configparser
from pathlib import Path

from modules.paths_internal import extensions_dir

extensions = []


class ExtensionMetadata:
    def __init__(self, path, canonical_name):
        self.config = configparser.ConfigParser()
        self.config.read(Path(path) / "metadata.ini")
        self.canonical_name = canonical_name.lower().strip()


class Extension:
    def __init__(self, name, path, enabled=True, is_builtin=False, metadata=None):
        self.name = name
        self.path = path
        self.metadata = metadata or ExtensionMetadata(path, name)
        self.canonical_name = self.metadata.canonical_name

    def list_files(self, subdir, extension):
        folder = Path(self.path) / subdir
        if not folder.is_dir():
            return []
        return [str(path) for path in sorted(folder.iterdir()) if path.suffix == extension]


def list_extensions():
    extensions.clear()
    if Path(extensions_dir).is_dir():
        for path in sorted(Path(extensions_dir).iterdir()):
            extensions.append(Extension(path.name, str(path)))


def active():
    return extensions


def find_extension(filename):
    for extension in extensions:
        if Path(filename).absolute().is_relative_to(Path(extension.path).absolute()):
            return extension
    return None
