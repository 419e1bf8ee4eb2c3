"""The only room that knows CuPy."""
