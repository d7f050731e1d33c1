"""Double of modules/ui_gradio_extensions.py.

The surface was read in lshqqytiger/stable-diffusion-webui-amdgpu e61adddd.
How the WebUI's script, and the scripts and style sheets of extensions, come into the page.
"""

from pathlib import Path

import gradio as gr

from modules import extensions
from modules.paths_internal import script_path

_original = gr.routes.templates.TemplateResponse


def _address(path):
    return f"file={path}?{Path(path).stat().st_mtime}"


def javascript_html():
    paths = [str(Path(script_path) / "script.js")]
    for extension in extensions.active():
        paths += extension.list_files("javascript", ".js")
    return "".join(f'<script type="text/javascript" src="{_address(p)}"></script>\n' for p in paths)


def css_html():
    paths = [Path(extension.path) / "style.css" for extension in extensions.active()]
    return "".join(
        f'<link rel="stylesheet" property="stylesheet" href="{_address(path)}">'
        for path in paths
        if path.is_file()
    )


def reload_javascript():
    scripts, styles = javascript_html().encode(), css_html().encode()

    def template_response(*args, **kwargs):
        response = _original(*args, **kwargs)
        response.body = response.body.replace(b"</head>", scripts + b"</head>")
        response.body = response.body.replace(b"</body>", styles + b"</body>")
        response.init_headers()
        return response

    gr.routes.templates.TemplateResponse = template_response
