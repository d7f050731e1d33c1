"""The Forge family's own parts; the script, the settings and the page are those of a1111."""
