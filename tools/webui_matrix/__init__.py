"""Compares pictures of a real WebUI with ours off and on, with real extensions beside us."""
