"""The suite: whole pictures by every way of making them, with their power and their quality."""
