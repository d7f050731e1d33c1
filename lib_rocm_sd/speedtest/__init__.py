"""The speed test: what a host's user measures on his own card. Knows neither gradio nor a WebUI."""
